"""Printing and running once per job."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from unidist import context as _context

F = TypeVar("F", bound=Callable[..., Any])


def is_main_process() -> bool:
    """Whether this is rank 0; True before `init`."""
    return _context._current is None or _context._current.world.rank == 0


def print(*values: Any, **keywords: Any) -> None:
    """The built-in `print`, once per job: on rank 0 only, flushed."""
    if is_main_process():
        builtins.print(*values, **{"flush": True, **keywords})


def main_process_only(function: F) -> F:
    """Decorator: the function runs on rank 0 only and returns None on the others. It must not call collectives."""

    @functools.wraps(function)
    def once(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords) if is_main_process() else None

    return once  # type: ignore[return-value]


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Rank 0 runs the block first (a download, a cache to fill), then all others; every rank must enter it."""
    from unidist.collectives import barrier

    if is_main_process():
        yield
        _wait(barrier)
    else:
        _wait(barrier)
        yield


def _wait(barrier: Callable[[], None]) -> None:
    if _context._current is not None:
        barrier()
