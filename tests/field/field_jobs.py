"""Jobs of the field tests: started together in several ways, timed, and looked over for processes that they left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from unidist.testing.jobs import clean_environment

_PATIENCE = 150.0
_pool = ThreadPoolExecutor(3)  # jobs at a time
Started = dict[str, "Future[Ended]"]


@dataclass
class Ended:
    """How each started process ended, what it printed, when.

    left: what still ran a moment later, by its command. busy: how many times slower than an idle machine this one was, at least.
    """

    codes: list[int]
    outputs: list[str]
    times: list[float]
    left: list[str]
    busy: float

    @property
    def output(self) -> str:
        """All of it."""
        return "\n".join(self.outputs)

    def since(self, mark: str) -> float:
        """Seconds from the line "MARK time" to the end of the last process."""
        line = next(line for line in self.output.splitlines() if line.rpartition("] ")[2].startswith(f"{mark} "))
        return max(self.times) - float(line.split()[-1])


def started(commands: list[list[str]], environs: list[dict[str, str]]) -> Future[Ended]:
    """The processes of one job; three jobs run at a time."""
    return _pool.submit(_run, commands, environs)


def by_hand(script: Path, *arguments: str, n: int = 2) -> Future[Ended]:
    """As a platform would start workers one by one: nobody ends the others when one fails."""
    port = free_port()
    own = [{"RANK": str(r), "WORLD_SIZE": str(n), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(n)} for r in range(n)]
    environs = [{**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} for one in own]
    return started([[sys.executable, str(script), *arguments]] * n, environs)


def unidist_run(script: Path, *arguments: str, n: int = 2) -> Future[Ended]:
    """`unidist run -n N`."""
    return started([[sys.executable, "-m", "unidist", "run", "-n", str(n), "--tee", "all", str(script), *arguments]], [{}])


def torchrun(script: Path, *arguments: str, n: int = 2) -> Future[Ended]:
    """torchrun on this host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return started([[*command, str(script), *arguments]], [{}])


def mpirun(script: Path, *arguments: str, n: int = 2) -> Future[Ended]:
    """Open MPI on this host."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(n)]
    return started([[*command, sys.executable, str(script), *arguments]], [{}])


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _run(commands: list[list[str]], environs: list[dict[str, str]]) -> Ended:
    mark = f"UNIDIST_FIELD_{uuid.uuid4().hex}"
    common = {**clean_environment(os.environ), mark: "1", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    running = [
        subprocess.Popen(command, env=common | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, own in zip(commands, environs)
    ]
    times = [0.0] * len(running)
    outputs = [""] * len(running)

    def wait(index: int) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            outputs[index] = running[index].communicate(timeout=_PATIENCE)[0]
        times[index] = time.time()

    with ThreadPoolExecutor(len(running)) as waiters:
        list(waiters.map(wait, range(len(running))))
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    left = _marked(mark)
    if left:
        time.sleep(1.0)
        left = _marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in running:
        process.wait()
    return Ended([process.returncode for process in running], outputs, times, list(left.values()), busy)


def _marked(mark: str) -> dict[int, str]:
    """Processes that carry the mark in their environment: pid to command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and f"{mark}=1".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
