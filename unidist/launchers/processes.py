"""The processes below this one: found by walking the process table, so that nothing a worker started is left behind."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes the kernel hand processes whose parent died to this one, so that they stay below it (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """For a new child: it is killed when `parent` dies, however that happens (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def descendants(root: int) -> list[int]:
    """The living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_descendants(seconds: float = 2.0) -> None:
    """Kills everything below this process, again while something new shows up, and reaps it."""
    end = time.monotonic() + seconds
    while (left := descendants(os.getpid())) and time.monotonic() < end:
        signal_all(left, signal.SIGKILL)
        time.sleep(0.01)
        reap()


def reap() -> list[tuple[int, int]]:
    """(pid, exit code) of every child that has ended, adopted ones too; a signal's code is its negative number."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


def _parents() -> list[tuple[int, int]]:
    """(pid, parent's pid) of every process that is not a zombie."""
    if not Path("/proc/self/stat").exists():
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in table.splitlines()]
        return [(int(pid), int(parent)) for pid, parent, state in rows if not state.startswith("Z")]
    found: list[tuple[int, int]] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found.append((int(name), int(parent)))
    return found


# Loaded here and not in the new child, where between fork and exec nothing may be imported or allocated.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
