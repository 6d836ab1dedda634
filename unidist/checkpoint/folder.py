"""A checkpoint on disk: a folder that is complete or not there. It is written beside its place, synced, and renamed.

Over an older one: once `NAME.new` is complete the two change places in one step, where the system can (Linux on its own file systems).
Elsewhere the older becomes `NAME.old` and the new one `NAME`: killed between the two, `NAME.old` is what is loaded, and the next save puts
it back.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
VERSION = 1
_FORMAT = "unidist checkpoint"
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD of <fcntl.h>, and the flag of renameat2(2)


def write(path: str | os.PathLike[str], files: Mapping[str, Callable[[Path], None]], contents: Mapping[str, Any]) -> None:
    """Write a folder of these files, each by its function, and the manifest with `contents`; replaces an older checkpoint.

    Raises FileExistsError when something else than a checkpoint is there, and what the file system raises; then nothing has changed.
    """
    place = Path(path).resolve()
    new, old = _beside(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    _recover(place, old)
    _check_replaceable(place)
    _remove(new)
    try:
        new.mkdir()
        for name, fill in files.items():
            fill(new / name)
        sums = {name: {"bytes": (new / name).stat().st_size, "crc32": _crc32((new / name).read_bytes())} for name in files}
        manifest = {"format": _FORMAT, "version": VERSION, "files": sums, **contents}
        (new / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*files, MANIFEST):
            _sync(new / name)
        _sync(new)
    except BaseException:
        _remove(new)
        raise
    if not (place.exists() and _exchange(new, place)):
        if place.exists():
            place.rename(old)
        new.rename(place)
    _sync(place.parent)
    _remove(old)
    _remove(new)


def read(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The bytes of all files by name, checked against the manifest, which is among them.

    Raises FileNotFoundError where no checkpoint is, ValueError for a damaged one and for another version of the format.
    """
    place = Path(path).resolve()
    old = _beside(place)[1]
    if not place.exists() and (old / MANIFEST).exists():
        place = old
    if not place.exists():
        raise FileNotFoundError(2, "there is no checkpoint", str(path))
    if not (place / MANIFEST).is_file():
        raise FileNotFoundError(2, f"this is no checkpoint: it has no {MANIFEST}", str(path))
    files = {MANIFEST: (place / MANIFEST).read_bytes()}
    for name, known in parse(files[MANIFEST], str(path))["files"].items():
        if Path(name).name != name or not (place / name).is_file():
            raise ValueError(f"the checkpoint {str(path)!r} is damaged: it has no file {name!r}")
        files[name] = (place / name).read_bytes()
        found = {"bytes": len(files[name]), "crc32": _crc32(files[name])}
        if found != known:
            raise ValueError(f"the checkpoint {str(path)!r} is damaged: {name!r} is not what was written ({found}, written {known})")
    return files


def parse(manifest: bytes, path: str) -> dict[str, Any]:
    """The manifest's contents. Raises ValueError when it is not one, or of a version that is not known here."""
    try:
        contents = json.loads(manifest)
    except ValueError as error:
        raise ValueError(f"the checkpoint {path!r} is damaged: its {MANIFEST} is no JSON ({error})") from error
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        raise ValueError(f"{path!r} is no checkpoint of unidist: its {MANIFEST} says nothing of the format {_FORMAT!r}")
    if contents.get("version") != VERSION:
        raise ValueError(
            f"the checkpoint {path!r} has version {contents.get('version')!r} of the format; this unidist reads version {VERSION}"
        )
    return contents


def _beside(place: Path) -> tuple[Path, Path]:
    return place.with_name(place.name + ".new"), place.with_name(place.name + ".old")


def _recover(place: Path, old: Path) -> None:
    """Undo what a writer left that was killed between the renames."""
    if not place.exists() and (old / MANIFEST).exists():
        old.rename(place)
    _remove(old)


def _check_replaceable(place: Path) -> None:
    """Raise FileExistsError where replacing would delete what no save has written."""
    if not place.exists():
        return
    if not place.is_dir():
        raise FileExistsError(17, "a checkpoint is a folder, and this is a file", str(place))
    names = set(os.listdir(place))
    if not names:
        return
    mine: set[str] = set()
    if MANIFEST in names:
        mine = {MANIFEST, *parse((place / MANIFEST).read_bytes(), str(place))["files"]}
    if names - mine:
        other = sorted(names - mine)[0]
        raise FileExistsError(17, f"this folder holds {other!r}, which is of no checkpoint; give one of its own", str(place))


def _exchange(one: Path, other: Path) -> bool:
    """Two folders change places in one step; False where the system can't do that, and nothing happened."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    return renameat2 is not None and renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _crc32(data: bytes) -> int:
    return zlib.crc32(data)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
