"""The running workers of one host: watched until all have ended, and ended together when one fails or a signal asks."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from unidist.control_server import Server
from unidist.control_session import ranks
from unidist.errors import LaunchError
from unidist.launchers import processes
from unidist.launchers.output import Output
from unidist.launchers.signals import terminal_interrupts_us
from unidist.watchdog import EXIT_CODE

_PATIENCE = 3.0  # seconds between asking the workers to end and killing them
_LAST_WORDS = 2.0  # seconds for the rank that failed first to end by itself, so that its traceback is complete
_HEARING = 0.5  # seconds for the others to hear of a failure and say so before they are stopped
_TICK = 1.0


@dataclass
class Worker:
    """One process of the job; `code` is None while it runs, and the negative number of a signal that ended it."""

    rank: int
    process: "subprocess.Popen[bytes]"
    code: int | None = None


class Job:
    """The workers, in the order of their ranks, and what has gone wrong with them."""

    def __init__(self, output: Output, arrived: list[int], server: Server | None) -> None:
        self.workers: list[Worker] = []
        self._output = output
        self._arrived = arrived
        self._server = server
        self._failed: list[int] = []  # the ranks that failed by themselves, in the order of their ends
        self._first: Worker | None = None  # the one that failed first, once that is settled
        self._signal = 0
        self._alarm: float | None = None
        self._kill_at: float | None = None

    def start(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """One worker for each of `environments`."""
        processes.adopt_orphans()
        for rank, environ in enumerate(environments):
            self.workers.append(Worker(rank, self._spawn(command, rank, environ)))

    def run(self) -> int:
        """Waits until every worker has ended; returns the job's exit code."""
        while any(worker.code is None for worker in self.workers):
            for key, _ in self._output.selector.select(self._seconds()):
                if key.data is None:
                    os.read(key.fd, 4096)
                else:
                    self._output.pump(key.data)
            self._reap()
            self._answer_signals()
            self._look_for_failure()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                processes.signal_all(processes.descendants(os.getpid()), signal.SIGKILL)
        if self._kill_at is not None or self._failed:
            processes.kill_descendants()
        self._output.drain()
        return 128 + self._signal if self._signal else self._verdict()

    def _spawn(self, command: list[str], rank: int, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
        parent = os.getpid()
        outputs = self._output.open(rank)
        try:
            return subprocess.Popen(
                command,
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                env=environ,
                start_new_session=rank > 0,
                preexec_fn=lambda: processes.die_with_parent(parent),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"{command[0]!r} can't be started: {error}") from error
        finally:
            for descriptor in outputs:
                if descriptor is not None:
                    os.close(descriptor)

    def _seconds(self) -> float:
        """How long nothing needs a look."""
        if self._kill_at is not None:
            return min(max(self._kill_at - time.monotonic(), 0.05), _TICK)
        return _TICK if self._alarm is None else 0.05

    def _reap(self) -> None:
        codes = dict(processes.reap())
        for worker in self.workers:
            if worker.process.pid in codes:
                worker.code = worker.process.returncode = codes[worker.process.pid]
                if worker.code != 0 and self._kill_at is None:
                    self._failed.append(worker.rank)
                if self._server is not None:
                    self._server.report_exit(worker.rank, describe(worker.code) if worker.code else None)

    def _answer_signals(self) -> None:
        """The first signal is passed on; a second one, or three seconds, end all that is left."""
        while self._arrived:
            number = self._arrived.pop(0)
            if self._signal:
                self._kill_at = time.monotonic()
                continue
            self._signal = number
            self._kill_at = time.monotonic() + _PATIENCE
            everyone = processes.descendants(os.getpid())
            if number == signal.SIGINT and terminal_interrupts_us():
                first = self.workers[0].process.pid
                reached = {first, *processes.descendants(first)}
                everyone = [pid for pid in everyone if pid not in reached]
            processes.signal_all(everyone, number)

    def _look_for_failure(self) -> None:
        """The rank that failed first may finish its last words, and the others hear of it; then they are ended."""
        if self._kill_at is not None:
            return
        first = self._culprit() if self._failed or (self._server and self._server.open_failures()) else None
        if first is None:
            self._alarm = None
            return
        now = time.monotonic()
        self._alarm = self._alarm or now
        patience = _LAST_WORDS if first.code is None else _HEARING
        if now - self._alarm >= patience or all(worker.code is not None for worker in self.workers):
            self._first = first
            processes.signal_all(processes.descendants(os.getpid()), signal.SIGTERM)
            self._kill_at = now + _PATIENCE

    def _culprit(self) -> Worker | None:
        """The rank that failed first: by the error board, which knows before a process has ended, else by its end."""
        board = self._server.failures() if self._server else {}
        suspects = [self.workers[rank] for rank in (*board, *self._failed)]
        return next((worker for worker in suspects if worker.code != 0), None)

    def _verdict(self) -> int:
        first = self._first
        if first is None:
            return 0
        code = first.code if first.rank in self._failed else None
        if len(self.workers) > 1:
            self._report(first, "its process did not end after its error" if code is None else describe(code))
        if code is None:
            return 1
        return code if code > 0 else 128 - code

    def _report(self, first: Worker, how: str) -> None:
        """The first failure on top, then those that followed from it, then the ranks that had to be stopped."""
        self._print(f"rank {first.rank} failed first: {how}")
        self._show_tail(first.rank)
        later = [rank for rank in self._failed if rank != first.rank]
        for rank in later:
            self._print(f"rank {rank} failed too: {describe(self.workers[rank].code or 1)}")
            self._show_tail(rank)
        stopped = [worker.rank for worker in self.workers if worker.code and worker.rank not in (first.rank, *later)]
        if stopped:
            self._print(f"{ranks(stopped)} stopped")

    def _show_tail(self, rank: int) -> None:
        lines = self._output.tail(rank)
        if lines:
            self._print(f"the last {len(lines)} lines of rank {rank}, all of them in {self._output.log(rank)}:")
            print(*(f"    {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)

    @staticmethod
    def _print(text: str) -> None:
        print(f"unidist run: {text}", file=sys.stderr, flush=True)


def describe(code: int) -> str:
    """An exit code in words."""
    if code == EXIT_CODE:
        return f"exit code {code} (a wait that could not end, or another rank's failure)"
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    return f"killed by {name}{hint}"
