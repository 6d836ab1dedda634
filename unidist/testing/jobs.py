"""Starts a job through `unidist run` in a process of its own, and ends it when its time is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unidist.launcher_variables import LAUNCHERS

_PATIENCE = 10.0  # seconds that `unidist run` has to end its workers
_TICK = 0.1
_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "UNIDIST_TRAIN_")
_NAMES = {"MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "KERAS_BACKEND"}


@dataclass(frozen=True)
class Ended:
    """code: of `unidist run`, None when it ran out of time; output: what it and rank 0 printed."""

    code: int | None
    output: str

    def words(self) -> str:
        """How it ended, with the last lines."""
        how = "the job ran out of time" if self.code is None else f"the job ended with code {self.code}"
        tail = "\n".join(self.output.rstrip().splitlines()[-15:])
        return f"{how}; its last lines:\n{tail}" if tail else how


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of launchers, of an outer job and of the choice of Keras' backend; unidist can be imported."""
    of_launchers: set[str] = set()
    for entry in LAUNCHERS:
        of_launchers |= {entry.sign, entry.tasks, *entry.rank, *entry.size, *entry.local_rank, *entry.local_size}
        of_launchers |= {*entry.node_rank, *entry.num_nodes}
    kept = {name: value for name, value in environ.items() if name not in of_launchers | _NAMES and not name.startswith(_PREFIXES)}
    root = str(Path(__file__).parents[2])
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([root, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]))
    kept.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return kept


def run_job(
    module: str,
    arguments: Sequence[str],
    n: int,
    *,
    folder: Path,
    timeout: float,
    backend: str | None = None,
    framework: str | None = None,
    processes: int | None = None,
    environ: Mapping[str, str] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Ended:
    """`unidist run -n N -m MODULE ARGUMENTS`; its output goes to a file in `folder`. `watch` is called while it runs."""
    command = [sys.executable, "-m", "unidist", "run", "-n", str(n), "--log-dir", str(folder / "logs")]
    command += ["--processes", str(processes)] if processes else []
    command += ["--backend", backend] if backend else []
    command += ["--framework", framework] if framework else []
    command += ["-m", module, *arguments]
    environment = clean_environment(os.environ) | {"UNIDIST_TRAIN_QUIET": "1"} | dict(environ or {})
    log = folder / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        code = _wait(process, timeout, watch)
    watch()
    return Ended(code, log.read_text(encoding="utf-8", errors="replace"))


def _wait(process: subprocess.Popen[bytes], timeout: float, watch: Callable[[], None]) -> int | None:
    """The exit code; None after `timeout` seconds, when all that the job started has been ended."""
    deadline = time.monotonic() + timeout
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_TICK)
            watch()
        return process.poll()
    finally:
        if process.returncode is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked once, `unidist run` ends its workers; then its process group is killed."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
