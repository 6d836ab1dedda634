"""Checks that all ranks hold the same, made before anything moves; a difference raises on every rank."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unidist.errors import CollectiveTimeoutError, MismatchError, PeerFailedError

if TYPE_CHECKING:
    from unidist.control import Control


_WHO_CAME = 2.0  # seconds in which the ranks that gave an operation up find each other


def check_same(control: Control, what: str, rows: Sequence[Sequence[Any]]) -> None:
    """Compare described items (name, shape, dtype, ...) across ranks: one hash, and the items only when those differ.

    Raises MismatchError on all ranks that names the first item that differs and what each rank has.
    """
    text = json.dumps([list(row) for row in rows], default=str)
    digests = control.gather(f"compare {what}", hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    tables = [json.loads(row) for row in control.gather(f"differences of {what}", text)]
    raise MismatchError(f"{what} differs between ranks: {first_difference(tables)}")


def first_difference(tables: Sequence[Sequence[Sequence[Any]]], ranks: Sequence[int] | None = None) -> str:
    """The first place at which the lists of the ranks (default: all) differ, in words."""
    ranks = range(len(tables)) if ranks is None else ranks
    if len({len(table) for table in tables}) > 1:
        counts = ", ".join(f"rank {rank} has {len(table)}" for rank, table in zip(ranks, tables))
        names = [{str(row[0]) for row in table} for table in tables]
        odd = sorted(name for name in set().union(*names) if not all(name in held for held in names))
        return f"{counts} entries" + (f"; not on every rank: {', '.join(odd[:5])}" if odd else "")
    for position, rows in enumerate(zip(*tables)):
        if any(row != rows[0] for row in rows):
            other = next(index for index, row in enumerate(rows) if row != rows[0])
            return f"number {position} is {_words(rows[0])} on rank {ranks[0]}, {_words(rows[other])} on rank {ranks[other]}"
    return "in their order"


def _words(row: Sequence[Any]) -> str:
    return " ".join(map(str, row))


def given_up(control: Control, operation: str, timeout: float, text: str) -> Exception:
    """What an engine's operation ended with after its time-out, with the ranks that the engine doesn't name.

    The ranks that gave up meet for a moment, so that it shows which did not. text: the engine's own words.
    """
    try:
        control.gather(f"the end of {operation}", "", timeout=_WHO_CAME)
    except PeerFailedError as known:
        return known
    except (CollectiveTimeoutError, MismatchError) as known:
        return CollectiveTimeoutError(f"{operation} was given up (timeout {timeout:g} s): {known}")
    return CollectiveTimeoutError(f"{operation} was given up on all ranks (timeout {timeout:g} s): {text}")


class Models:
    """The wrapped models that still live, by the order of wrapping, which all ranks share."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._with_statistics: set[int] = set()
        self._count = 0

    def add(self, model: Any, *, statistics: bool) -> None:
        """Every rank must call it; statistics: whether the model has running statistics."""
        self._numbers[model] = self._count
        if statistics:
            self._with_statistics.add(self._count)
        self._count += 1

    def __contains__(self, model: Any) -> bool:
        return model in self._numbers

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._numbers))

    def with_statistics(self, control: Control) -> list[Any]:
        """Those that have running statistics and live on every rank, in one order; every rank must call it.

        A model that one rank has dropped, at its garbage collector's whim, is nobody's concern any more.
        """
        if not self._with_statistics:
            return []
        mine = {number: model for model, number in self._numbers.items() if number in self._with_statistics}
        alive = [set(json.loads(row)) for row in control.gather("the running statistics", json.dumps(list(mine)))]
        return [mine[number] for number in sorted(set.intersection(*alive))]
