"""Checks that all ranks hold the same, made before anything moves; a difference raises on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unidist.errors import MismatchError

if TYPE_CHECKING:
    from unidist.control import Control


def check_same(control: Control, what: str, rows: Sequence[Sequence[Any]]) -> None:
    """Compare described items (name, shape, dtype, ...) across ranks: one hash, and the items only when those differ.

    Raises MismatchError on all ranks that names the first item that differs and what each rank has.
    """
    import hashlib  # most processes never compare

    text = json.dumps([list(row) for row in rows], default=str)
    digests = control.gather(f"compare {what}", hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    tables = [json.loads(row) for row in control.gather(f"differences of {what}", text)]
    raise MismatchError(f"{what} differs between ranks: {first_difference(tables)}")


def first_difference(tables: Sequence[Sequence[Sequence[Any]]]) -> str:
    """The first place at which the ranks' lists differ, in words."""
    if len({len(table) for table in tables}) > 1:
        counts = ", ".join(f"rank {rank} has {len(table)}" for rank, table in enumerate(tables))
        names = [{str(row[0]) for row in table} for table in tables]
        odd = sorted(name for name in set().union(*names) if not all(name in held for held in names))
        return f"{counts} entries" + (f"; not on every rank: {', '.join(odd[:5])}" if odd else "")
    for position, rows in enumerate(zip(*tables)):
        if any(row != rows[0] for row in rows):
            other = next(rank for rank, row in enumerate(rows) if row != rows[0])
            return f"number {position} is {_words(rows[0])} on rank 0, {_words(rows[other])} on rank {other}"
    return "in their order"


def _words(row: Sequence[Any]) -> str:
    return " ".join(map(str, row))
