"""What one rank does and all ranks hear of: an error on any of them is raised on every one, as the same kind."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any

from unidist import errors
from unidist.control import Control
from unidist.errors import CollectiveTimeoutError, MismatchError, PeerFailedError


def meet(control: Control, verb: str, payload: str) -> list[str]:
    """All ranks' payloads at the beginning of a verb; a rank that does not come is told of what it has to do."""
    try:
        return control.gather(verb, payload)
    except (CollectiveTimeoutError, MismatchError, PeerFailedError) as error:
        if isinstance(error, PeerFailedError) and "without an error" not in str(error):
            raise
        raise type(error)(f"{error}; all ranks must call unidist.{verb}, not rank 0 alone") from error


def attempt(control: Control, verb: str, function: Callable[[], Any], *, here: bool = True) -> Any:
    """`function()` on the ranks where `here` is true; returns its result there, and only when all ranks are through.

    Every rank must call it. An error of any rank is raised on all of them: its own there, one of the same kind elsewhere.
    """
    result, mine = None, None
    if here:
        try:
            result = function()
        except Exception as error:  # whatever it is, the others wait for it
            mine = error
    rows = [json.loads(row) for row in control.gather(f"{verb}'s end", json.dumps(None if mine is None else _told(mine)))]
    if mine is not None:
        raise mine
    for rank, row in enumerate(rows):
        if row is not None:
            raise _again(row, rank, verb)
    return result


def _told(error: Exception) -> list[Any]:
    arguments = [error.errno, error.strerror, error.filename] if isinstance(error, OSError) and error.errno else None
    return [type(error).__name__, str(error), arguments]


def _again(row: list[Any], rank: int, verb: str) -> Exception:
    """Another rank's error."""
    name, text, arguments = row
    if arguments is not None:
        number, words, filename = arguments
        return OSError(number, f"{words} (on rank {rank})", filename)
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, (errors.UnidistError, TypeError, ValueError))):
        return RuntimeError(f"{verb} failed on rank {rank}: {name}: {text}")
    return kind(f"{text} (on rank {rank})")
