"""`unidist run`: start a script as the workers of one host."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from unidist import registry
from unidist.errors import LaunchError
from unidist.launchers.gpus import num_visible_gpus
from unidist.launchers.local import launch


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT", help="The script and what belongs to it.")],
    devices: Annotated[int | None, typer.Option("-n", "--num-devices", min=1, help="Devices of the job; all visible GPUs, else 1.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Processes that share the devices, where one drives several (mirrored).")
    ] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="What the job runs on; wins over unidist.init.")] = None,
    framework: Annotated[str | None, typer.Option("--framework", help="torch or tensorflow, where the backend has both.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")] = False,
    tee: Annotated[str | None, typer.Option("--tee", help="all: show every rank's output, each line with its rank.")] = None,
    log_dir: Annotated[Path | None, typer.Option("--log-dir", help="Keep the output of the ranks above 0 here.")] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="MASTER_PORT; a free one by default.")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, help="Seconds that bound every collective; wins over unidist.init.")
    ] = None,
) -> None:
    """Run SCRIPT on N devices of this host.

    The backend decides how many processes that takes. Rank 0 has the terminal; of a rank that fails the last lines are shown.
    """
    if tee not in (None, "all"):
        raise typer.BadParameter(f"{tee!r} is not known; 'all' is", param_hint="--tee")
    total = devices or max(num_visible_gpus(), 1)
    workers = registry.num_processes(backend, framework, total, processes)
    each = devices if processes is None else max(total // processes, 1)
    settings = _settings(backend, framework, each, timeout) | _keras_backend(backend, framework, os.environ)
    code = launch(_command(command, module), workers, environ=os.environ, tee=tee == "all", settings=settings, log_dir=log_dir, port=port)
    raise typer.Exit(code)


def _settings(backend: str | None, framework: str | None, devices: int | None, timeout: float | None) -> dict[str, str]:
    """What the workers' `unidist.init` is told, which wins over its arguments."""
    told = {"BACKEND": backend, "FRAMEWORK": framework, "NUM_DEVICES": devices, "TIMEOUT": timeout}
    return {f"UNIDIST_TRAIN_{name}": str(value) for name, value in told.items() if value is not None}


def _keras_backend(backend: str | None, framework: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Keras follows the framework that was chosen, or that the backend implies; the user's own choice may not contradict it."""
    chosen = registry.framework_name(framework) if framework is not None else _implied(backend)
    if chosen is None:
        return {}
    own = environ.get("KERAS_BACKEND")
    if own and own != chosen:
        given = f"--framework {framework}" if framework is not None else f"--backend {backend}"
        raise LaunchError(f"KERAS_BACKEND is {own!r}, but {given} runs Keras on {chosen!r}: unset the one or change the other")
    return {"KERAS_BACKEND": chosen}


def _implied(backend: str | None) -> str | None:
    """The framework of a backend that only one framework has."""
    if backend is None or backend == "auto":
        return None
    owners = {entry.framework for entry in registry.candidates(backend)}
    return owners.pop() if len(owners) == 1 else None


def _command(command: list[str], module: bool) -> list[str]:
    """The workers' command line: Python's for a module or a .py file, the program itself otherwise."""
    name, *arguments = command
    if module:
        return [sys.executable, "-m", name, *arguments]
    if name.endswith(".py") or Path(name).is_dir():
        if not Path(name).exists():
            raise LaunchError(f"there is no script {name!r} in {os.getcwd()}")
        return [sys.executable, name, *arguments]
    if shutil.which(name) is None:
        raise LaunchError(f"{name!r} is neither a .py file nor a program that can be run here")
    return [name, *arguments]
