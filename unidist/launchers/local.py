"""Starts the workers of one host: their variables, the control plane they meet on, their output. The engine of `unidist run`.

Rank 0 stays in the launcher's process group, so it has the terminal: debugger, colours, Ctrl-C. The others get a
session each. Everything below the launcher is found by walking the process table, orphans included.
"""

import contextlib
import selectors
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from unidist.control_server import Server
from unidist.errors import LaunchError
from unidist.hardware.cpus import num_cores
from unidist.launchers import processes
from unidist.launchers.job import Job
from unidist.launchers.output import Output
from unidist.launchers.signals import collected, terminal_kept

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def launch(
    command: list[str],
    num_workers: int,
    *,
    environ: Mapping[str, str],
    tee: bool,
    settings: dict[str, str],
    log_dir: Path | None = None,
    port: int | None = None,
) -> int:
    """Runs `command` as `num_workers` workers of this host and returns the job's exit code; main thread only.

    0 when all ended well; the code of the worker that failed first, or 128 + its signal; 128 + the signal that ended
    the launcher, so 130 after Ctrl-C. `settings`: more variables for the workers. `tee`: every line of every rank,
    with its rank. `log_dir`: keeps the other ranks' output there. `port`: the job's MASTER_PORT. Raises `LaunchError`
    when the workers can't be started.
    """
    variables = _common(environ, num_workers, _master_port(port)) | settings
    server = Server(num_workers) if num_workers > 1 else None
    if server is not None:
        variables["UNIDIST_TRAIN_STORE"] = f"127.0.0.1:{server.port}/{server.token}"
    directory = _directory(log_dir)
    code = 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminal_kept())
        selector = stack.enter_context(selectors.DefaultSelector())
        output = Output(directory, tee, log_dir is not None, selector)
        job = Job(output, stack.enter_context(collected(selector)), server)
        try:
            job.start(command, [variables | _of_rank(rank) for rank in range(num_workers)])
            if server is not None:
                server.start()  # only now: a child forked while a thread holds a lock could hang
            code = job.run()
        except BaseException:
            processes.kill_descendants()
            raise
        finally:
            if server is not None:
                server.close()
            if log_dir is None and code == 0:
                shutil.rmtree(directory, ignore_errors=True)
    return code


def _common(environ: Mapping[str, str], num_workers: int, port: int) -> dict[str, str]:
    """What all workers get; also what a torch script without unidist needs. An outer torchrun's variables go."""
    variables = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    variables |= {
        "UNIDIST_TRAIN_WORLD_SIZE": str(num_workers),
        "UNIDIST_TRAIN_LOCAL_WORLD_SIZE": str(num_workers),
        "UNIDIST_TRAIN_NODE_RANK": "0",
        "UNIDIST_TRAIN_NUM_NODES": "1",
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    variables.setdefault("PYTHONUNBUFFERED", "1")  # a worker that is ended loses nothing that it printed
    if num_workers > 1:
        threads = str(max(num_cores() // num_workers, 1))
        variables |= {name: threads for name in _THREAD_VARIABLES if name not in environ}
    return variables


def _of_rank(rank: int) -> dict[str, str]:
    return {name: str(rank) for name in ("UNIDIST_TRAIN_RANK", "UNIDIST_TRAIN_LOCAL_RANK", "RANK", "LOCAL_RANK")}


def _master_port(chosen: int | None) -> int:
    """The port that the user chose, if it is free, else any free one."""
    try:
        with socket.create_server(("", chosen or 0)) as probe:
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise LaunchError(f"port {chosen} can't be used on this host ({error}): choose another, or leave --port out") from error


def _directory(log_dir: Path | None) -> Path:
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="unidist-"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {str(log_dir)!r} can't be made: {error.strerror}") from error
    return log_dir
