"""Running the user's own installer: pip, or uv where the environment has no pip."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from unidist.errors import LaunchError, MissingDependencyError
from unidist.horovod_target import find_distribution


def install_missing(names: Sequence[str]) -> None:
    """Install those of the packages that this Python lacks."""
    missing = [name for name in names if find_distribution(name) is None]
    if missing:
        run_installer(missing)


def run_installer(arguments: Sequence[str]) -> None:
    """`pip install`, or `uv pip install` where the environment has no pip."""
    command = [*install_command(), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    importlib.invalidate_caches()
    if done.returncode:
        lines = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise LaunchError(f"{lines}\n`{' '.join(command)}` failed")


def install_command() -> list[str]:
    """The installer that the user works with, up to the names of what to install."""
    uv = shutil.which("uv")
    if uv and importlib.util.find_spec("pip") is None:
        return [uv, "pip", "install", "--python", sys.executable]
    return [*pip_command(), "install"]


def pip_command() -> list[str]:
    """pip run by this Python; in an environment without it, the copy that Python itself carries, run from its file."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    bundled = sorted(Path(str(ensurepip.origin)).parent.glob("_bundled/pip-*.whl")) if ensurepip else []
    if not bundled:
        raise MissingDependencyError(
            f"downloading Horovod's source needs pip, and {sys.executable} has none: `python -m ensurepip`, or with uv `uv pip install pip`"
        )
    return [sys.executable, str(bundled[-1] / "pip")]
