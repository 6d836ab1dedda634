"""Signals as entries of a list, each of which also wakes a selector; what was installed before comes back at the end."""

import contextlib
import os
import selectors
import signal
import termios
from collections.abc import Iterator
from types import FrameType

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def collected(selector: selectors.BaseSelector) -> Iterator[list[int]]:
    """The signals that ask this process to end, as they come. SIGCHLD only wakes. One that is ignored stays so (nohup)."""
    arrived: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            arrived.append(number)

    source, sink = os.pipe()
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    caught = [number for number in (*_ENDS, signal.SIGCHLD) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in caught}
    before_sink = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    selector.register(source, selectors.EVENT_READ, None)
    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(before_sink)
        for number, handler in before.items():
            signal.signal(number, handler)
        selector.unregister(source)
        os.close(source)
        os.close(sink)


@contextlib.contextmanager
def terminal_kept() -> Iterator[None]:
    """Gives the terminal back as it was: a debugger that had to be killed leaves it without echo."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        yield
    finally:
        if terminal_interrupts_us():
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def terminal_interrupts_us() -> bool:
    """Whether Ctrl-C reaches the whole process group from the terminal, this process being in its foreground."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
