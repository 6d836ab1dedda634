"""The watchdog: one daemon thread per process that ends it, with code 83, when a wait can't end any other way."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from unidist.control_session import calls, ranks
from unidist.wire import Message, Stream

EXIT_CODE = 83
_TICK = 1.0
_LAST_TICK = 9.0  # seconds after a failure; the contract says that a job ends within 10
_OVERTIME = 5.0


class Waiting:
    """`with control.waiting("all_reduce"):` around an engine call that can't be interrupted; costs two assignments."""

    __slots__ = ("_previous", "_spot", "operation", "since", "timeout")

    def __init__(self, spot: "Spot", operation: str, timeout: float) -> None:
        self._spot = spot
        self.operation = operation
        self.timeout = timeout

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self._previous = self._spot.inside
        self._spot.inside = self

    def __exit__(self, *_: object) -> None:
        self._spot.inside = self._previous


class Spot:
    """Where this process is: the engine call that its main thread is in. The watchdog only ever reads it."""

    __slots__ = ("inside",)

    def __init__(self) -> None:
        self.inside: Waiting | None = None


class Watchdog(threading.Thread):
    """Listens on a connection of its own to what befalls the others, and looks at where this process is."""

    def __init__(self, stream: Stream, spot: Spot, rank: int, size: int, grace: float, server: str) -> None:
        super().__init__(name="unidist-watchdog", daemon=True)
        self.failures: dict[int, str] = {}
        self.reason: tuple[float, str] | None = None
        self.server_closed = False
        self._stream = stream
        self._spot = spot
        self._rank = rank
        self._size = size
        self._grace = grace
        self._server = server
        self._stopped = threading.Event()
        self._told: Waiting | None = None
        self._who: dict[int, str] | None = None

    def stop(self) -> None:
        """This process ends in order: nothing ends it from here on."""
        self._stopped.set()

    def failed_here(self, text: str) -> None:
        """This rank posted an error of its own, so its process has to end as well."""
        self._fail(f"rank {self._rank} failed: {text}")

    def run(self) -> None:
        last: Waiting | None = None
        while not self._stopped.is_set():
            self._listen(self._seconds(last))
            inside = self._spot.inside
            if inside is last:
                self._tell(inside)
            last = inside
            self._judge(inside, time.monotonic())
        self._stream.close()

    def _seconds(self, inside: Waiting | None) -> float:
        """Until the next look; a look costs a few microseconds and no traffic."""
        if self.reason is not None:
            return 0.2
        if inside is None:
            return _TICK
        return min(max(inside.since + inside.timeout + _OVERTIME - time.monotonic(), 0.05), _TICK)

    def _listen(self, seconds: float) -> None:
        if self.server_closed:
            self._stopped.wait(seconds)
            return
        try:
            self._note(self._stream.receive(seconds))
        except TimeoutError:
            return
        except (OSError, ValueError):
            if not self._stopped.is_set():
                self.server_closed = True
                self._fail(f"{self._server}, which serves the control plane, is gone")

    def _note(self, message: Message) -> None:
        if message.get("event") == "failed":
            rank, text = int(message["rank"]), str(message["text"])
            self.failures[rank] = text
            self._fail(f"rank {rank} failed: {text}")
        elif message.get("event") == "closing":
            self.server_closed = True
        elif "who" in message:
            self._who = {int(rank): name for rank, name in message["who"].items()}

    def _fail(self, reason: str) -> None:
        if self.reason is None:
            self.reason = (time.monotonic(), reason)

    def _tell(self, inside: Waiting | None) -> None:
        """Tells the server about a wait that has lasted for a tick, and about its end; nothing while steps are quick."""
        if inside is self._told or self.server_closed:
            return
        self._told = inside
        self._send({"op": "outside"} if inside is None else {"op": "inside", "name": inside.operation})

    def _judge(self, inside: Waiting | None, now: float) -> None:
        if self.reason is not None:
            since, reason = self.reason
            if inside is not None and now - max(since, inside.since) >= self._grace:
                self._exit(f"{reason}; rank {self._rank} was in {inside.operation}")
            if now - since >= _LAST_TICK:
                where = f"was in {inside.operation}" if inside else "had not ended by itself"
                self._exit(f"{reason}; rank {self._rank} {where}, {_LAST_TICK:g} s later")
        elif inside is not None and now - inside.since >= inside.timeout + _OVERTIME:
            self._exit(self._overdue(inside, now))

    def _overdue(self, inside: Waiting, now: float) -> str:
        text = f"rank {self._rank} waited {now - inside.since:.0f} s in {inside.operation}"
        self._send({"op": "who"})
        while self._who is None and not self.server_closed and time.monotonic() - now < 2.0:
            self._listen(0.2)
        if self._who is None:
            return text
        others = {rank: name for rank, name in sorted(self._who.items()) if rank != self._rank}
        silent = [rank for rank in range(self._size) if rank != self._rank and rank not in others]
        if others:
            text += f"; known to wait: {calls(others).replace(' called ', ' in ', 1)}"
        return f"{text}; not known to wait: {ranks(silent)}" if silent else text

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._stream.send(message)

    def _exit(self, text: str) -> None:
        if self._stopped.is_set():
            return
        self._send({"op": "fail", "text": text})
        _bounded(_flush_output, 0.5)
        os.write(2, f"unidist: {text}\n".encode(errors="replace"))
        time.sleep(0.2)  # the server may live in this process: its thread passes the text on meanwhile
        os._exit(EXIT_CODE)


def _flush_output() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _bounded(action: Callable[[], None], seconds: float) -> None:
    """Runs `action` for at most `seconds`: the stuck main thread may hold the lock that it needs."""
    helper = threading.Thread(target=action, daemon=True)
    helper.start()
    helper.join(seconds)
