"""What the ranks know of each other's gradients: which exist, which are sparse; told once, when an exchange is first made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from unidist.control import Control
from unidist.errors import UnsupportedError
from unidist_tf.state import raw

NONE, SPARSE, DENSE = 0, 1, 2


class Kinds:
    """For each list of variables the kind of every gradient over all ranks, so that all send the same tensors."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._agreed: dict[tuple[int, ...], tuple[list[int], Any]] = {}

    def filled(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients in the agreed kinds: zeros where another rank has one, None where no rank had one.

        Raises UnsupportedError for a gradient where no rank had one when the exchange was first made.
        """
        mine = [_kind(g) for g in gradients]
        kinds = self._find(mine, variables)
        for kind, own, variable in zip(kinds, mine, variables):
            if own and not kind:
                raise UnsupportedError(
                    f"variable {variable.name!r} had no gradient on any rank when this step was first made and has one now, which the "
                    "other ranks can't know; use all variables in the first step, or another optimizer from here on"
                )
        return [_as_kind(g, kind, raw(v)) for g, kind, v in zip(gradients, kinds, variables)]

    def used(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Flags that ride along: their sum is 0 for a variable that no rank used in this step."""
        return [tf.constant([float(g is not None) for g in gradients])]

    def _find(self, mine: list[int], variables: Sequence[Any]) -> list[int]:
        key = tuple(id(raw(v)) for v in variables)
        if key not in self._agreed:
            rows = [json.loads(row) for row in self._control.gather("the first exchange of gradients", json.dumps(mine))]
            # The variables stay alive, so that no id is another's.
            self._agreed[key] = ([max(column) for column in zip(*rows)], list(variables))
        return self._agreed[key][0]


def _kind(gradient: Any) -> int:
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE


def _as_kind(gradient: Any, kind: int, variable: Any) -> Any:
    if kind == NONE:
        return None
    if kind == DENSE:
        return tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
    if gradient is None:
        return tf.IndexedSlices(tf.zeros([0, *variable.shape[1:]], variable.dtype), tf.zeros([0], tf.int32), tf.shape(variable))
    return gradient
