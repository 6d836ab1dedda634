"""One call of a collective: who takes part, the values as tensors, what is compared before data moves, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidist.agreement import first_difference
from unidist.base import Backend
from unidist.context import current_backend
from unidist.errors import MismatchError
from unidist.groups import Group, find_group, members, position
from unidist.nest import map_nest, paths


@dataclass
class Leaf:
    """A tensor of a call, its place in the nest, and for `all_to_all` how many rows go to each rank."""

    place: str
    tensor: Any
    shape: tuple[int, ...]
    dtype: str
    sizes: list[int] = field(default_factory=list)


Prepare = Callable[[Any], Any]
_WRONG = (TypeError, ValueError, OverflowError)  # what a leaf that can't take part raises


class Call:
    """`name` among the ranks of `group`; on a rank outside the group it raises at once, and the others don't notice."""

    def __init__(self, name: str, group: object = None) -> None:
        self.backend: Backend = current_backend()
        self.group: Group | None = find_group(self.backend, group, name)
        self.ranks: Sequence[int] = members(self.backend, self.group)
        self.place = position(self.backend, self.group)
        self.size = len(self.ranks)
        self.options: dict[str, Any] = {} if self.group is None else {"group": self.group}
        self.name = name if self.group is None else f"{name} among ranks {list(self.ranks)}"

    def gather(self, mine: Any) -> list[Any]:
        """The ranks' plain values, over the control plane, with their time-out."""
        only = None if self.group is None else self.ranks
        return [json.loads(row) for row in self.backend.control.gather(self.name, json.dumps(mine), ranks=only)]

    def leaves(self, x: Any, prepare: Callable[[Leaf], None] | None = None, *, rows: bool = False) -> list[Leaf]:
        """The leaves of `x` as tensors. rows: a 0-d one becomes one row. prepare: more of a leaf that only this rank may check."""
        found = []
        for place, value in paths(x):
            tensor = self.backend._as_tensor(value)
            tensor = self.backend._as_rows(tensor) if rows else tensor
            leaf = Leaf(place or "the value", tensor, *self.backend._signature(tensor))
            if prepare is not None:
                prepare(leaf)
            found.append(leaf)
        return found

    def agree(self, read: Callable[[], list[Leaf]], *, first_free: bool = False, always: bool = False) -> tuple[list[Leaf], list[Any]]:
        """The leaves that `read` gives, and every rank's rows of (place, shape, dtype, sizes), after they were compared.

        first_free: first dimensions may differ. always: rows are needed, so they travel also without `init(check=True)`. What `read`
        raises here raises a MismatchError on the other ranks; so do values that don't fit together, on all.
        """
        compares = self.size > 1 and (always or self.backend.settings.check)
        try:
            leaves = read()
        except _WRONG as error:
            if compares:
                self.gather(f"{type(error).__name__}: {error}")
            raise
        mine = [[leaf.place, list(leaf.shape), leaf.dtype, leaf.sizes] for leaf in leaves]
        rows = self.gather(mine) if compares else [mine]
        for rank, row in zip(self.ranks, rows):
            if isinstance(row, str):
                raise MismatchError(f"{self.name} can't take what rank {rank} gave it: {row}")
        compared = [[[place, ["any", *shape[1:]] if first_free else shape, dtype] for place, shape, dtype, _ in row] for row in rows]
        if any(row != compared[0] for row in compared):
            raise MismatchError(f"{self.name} got values that don't fit together: {first_difference(compared, self.ranks)}")
        return leaves, rows

    def rebuild(self, x: Any, tensors: Sequence[Any], *, rows: bool = False) -> Any:
        """The nest again, each leaf as what it was; rows: a number's rows are an array, not a number."""
        found = iter(tensors)
        return map_nest(lambda leaf: self.backend._as_leaf(next(found), _rows_like(leaf) if rows else leaf), x)


def _rows_like(leaf: Any) -> Any:
    import numpy

    return numpy.asarray(leaf)[None][:0] if isinstance(leaf, (bool, int, float, complex, numpy.generic)) else leaf
