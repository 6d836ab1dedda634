"""`unidist.testing.run`: a function of a test on the ranks of a job of its own; their results, or their error, come back."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unidist.errors import LaunchError, PeerFailedError
from unidist.testing.jobs import Ended, run_job

CALLING = "unidist.testing.calling"
MAIN = "__mp_main__"  # the name under which `multiprocessing` knows a script's own module, so that classes find home


class RankError(Exception):
    """The cause of an error that came from a rank: its traceback there."""


def run(
    function: Callable[..., Any],
    n: int,
    *,
    backend: str | None = None,
    framework: str | None = None,
    args: Sequence[Any] = (),
    timeout: float = 60.0,
    environ: dict[str, str] | None = None,
) -> list[Any]:
    """`function(*args)` on every rank of a job of n devices, started as `unidist run` does; the ranks' results, by rank.

    function: of a module or script, at its top level, since each rank loads it from its file; like a script, it calls
    `unidist.init` itself. args and results travel as pickles. backend, framework: as for `unidist run`. environ: more variables for
    the ranks. timeout: seconds for the job.

    Raises what a rank raised, with that rank's traceback as its cause; LaunchError when a rank died otherwise; TimeoutError;
    ValueError for a function that can't be loaded from its file.
    """
    where = _locate(function)
    with tempfile.TemporaryDirectory(prefix="unidist-run-") as name:
        folder = Path(name)
        (folder / "call.pickle").write_bytes(pickle.dumps((where, [str(path) for path in sys.path], pickle.dumps(tuple(args)))))
        ended = run_job(CALLING, [str(folder)], n, folder=folder, timeout=timeout, backend=backend, framework=framework, environ=environ)
        return _results(folder, ended)


def _locate(function: Callable[..., Any]) -> tuple[str, str, str]:
    """(module, its file, the function's name)."""
    name = getattr(function, "__qualname__", "")
    if "<" in name or "." in name or not name:
        raise ValueError(
            f"{name or function!r} can't be loaded by another process: give a function that is defined with def at the top level of "
            "a module or script, and pass what it needs as args"
        )
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        raise ValueError(f"{name!r} was defined where no file is ({function.__module__!r}): put it into a module or a script")
    if getattr(module, name, None) is not function:
        raise ValueError(f"{function.__module__}.{name} is not the function that was given (decorated?): give the one of that name")
    return function.__module__, str(Path(file).resolve()), name


def _results(folder: Path, ended: Ended) -> list[Any]:
    import multiprocessing  # noqa: F401  gives this script's module the name MAIN as well

    paths = sorted(folder.glob("rank*.pickle"), key=lambda path: int(path.stem.removeprefix("rank")))
    rows = [pickle.loads(path.read_bytes()) for path in paths]
    failed = [(row["when"], rank, row) for rank, row in ((row["rank"], row) for row in rows) if "traceback" in row]
    if failed:
        own = [one for one in failed if one[2]["kind"] != PeerFailedError.__name__] or failed
        _, rank, row = min(own, key=lambda one: one[:2])
        raise _error(row) from RankError(f"on rank {rank}:\n{row['traceback']}")
    if ended.code is None:
        raise TimeoutError(ended.words())
    if ended.code != 0 or not rows or len(rows) != rows[0]["size"]:
        raise LaunchError(ended.words())
    return [pickle.loads(row["result"]) for row in rows]


def _error(row: dict[str, Any]) -> BaseException:
    try:
        error = pickle.loads(row["error"])
    except Exception:  # an error that does not survive its pickle is told by its text
        error = None
    return error if isinstance(error, BaseException) else LaunchError(row["text"])
