"""The program of each rank of `unidist.testing.run`: loads the function, calls it, writes down what came of it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from unidist.testing.running import MAIN
from unidist.world import read_world


def load(module: str, file: str) -> ModuleType:
    """The function's module: by name where that finds the file, else from the file, under its name."""
    if module == "__main__":
        loaded = _from_file(MAIN, file)
        sys.modules["__main__"] = loaded
        return loaded
    spec = importlib.util.find_spec(module) if "." not in module or importlib.util.find_spec(module.partition(".")[0]) else None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file):
        return importlib.import_module(module)
    return _from_file(module, file)


def _from_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} can't be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call(folder: Path) -> dict[str, Any]:
    """What the function gave: {"result": a pickle}, or the error with its traceback."""
    try:
        (module, file, name), path, arguments = pickle.loads((folder / "call.pickle").read_bytes())
        sys.path[:] = [*dict.fromkeys([*path, *sys.path])]
        function = getattr(load(module, file), name)
        return {"result": pickle.dumps(function(*pickle.loads(arguments)))}
    except Exception as error:  # whatever it was, the caller is to see it
        text = "".join(traceback.format_exception(error))
        return {"traceback": text, "text": f"{type(error).__name__}: {error}", "error": _pickled(error), "kind": type(error).__name__}


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # the text has to do
        return b""


def main() -> None:
    """Call and write; a rank that failed ends with 1, so that the job ends."""
    folder, world = Path(sys.argv[1]), read_world(os.environ)
    row = call(folder) | {"when": time.time(), "rank": world.rank, "size": world.size}
    (folder / f"rank{world.rank}.pickle").write_bytes(pickle.dumps(row))
    if "traceback" in row:
        sys.exit(row["text"])


if __name__ == "__main__":
    main()
