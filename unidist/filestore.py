"""One value in a file that only this user can read, for ranks that share a host: written in one step, read when there."""

import os
import stat
import tempfile
from pathlib import Path

from unidist.errors import LaunchError


def path_of(name: str) -> Path:
    """The file for `name`. Raises `LaunchError` when its directory is not this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"unidist-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise LaunchError(f"the ranks meet in {folder}, so it has to be a directory of this user alone (mode 0700): remove it")
    return folder / name


def put(path: Path, value: str) -> None:
    """Stores `value`; nobody ever reads a part of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(value)
    draft.replace(path)


def get(path: Path) -> str | None:
    """The value; None when it is not there yet."""
    return path.read_text() if path.exists() else None


def forget(path: Path) -> None:
    path.unlink(missing_ok=True)
