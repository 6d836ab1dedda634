"""Means over all samples of all ranks, exact and the same number everywhere; they travel over the control plane."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unidist.errors import UnsupportedError

if TYPE_CHECKING:
    from unidist.base import Backend
    from unidist.batch import Share
    from unidist.control import Control


def sum_over_ranks(control: Control, name: str, values: Sequence[float]) -> list[float]:
    """Element-wise sums of float64 values over all ranks, rounded once; every rank must call it."""
    rows = [json.loads(text) for text in control.gather(name, json.dumps(list(values)))]
    return [_fsum(column) for column in zip(*rows)]


def _fsum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or beyond the range
        return float(sum(values))


class Mean:
    """A running mean over all samples of all ranks.

    `update(value)` takes a scalar mean over this process's share of the batch last drawn from `wrap_data`, or values one per
    sample; `weight=` or `share=` say otherwise what it counts. No rank waits in `update`; `compute` is a collective.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sums = [0.0, 0.0]

    def update(self, value: Any, *, weight: float | None = None, share: Share | None = None) -> None:
        """Add a scalar that is a mean over `weight` samples (default: this process's share), or one value per sample.

        Waits for the device. An empty share adds nothing. Raises UnsupportedError for values of more than one axis.
        """
        value = self._backend._as_leaf(self._backend._as_tensor(value), 0.0 if _ndim(value) == 0 else _NUMPY())
        drawn = share
        if share is None and weight is None:
            self._backend.shares.seen()
            drawn = self._backend.shares.last
        if _ndim(value) > 1:
            raise UnsupportedError(f"Mean.update takes a scalar or one value per sample, not an array of shape {value.shape}")
        if _ndim(value) == 1:
            values = [float(v) for v in value][: drawn.size if drawn is not None else None]
            self._add(math.fsum(values), float(len(values)))
        else:
            count = float(weight) if weight is not None else float(drawn.size if drawn is not None else 1)
            if count:
                self._add(float(value) * count, count)

    def _add(self, total: float, weight: float) -> None:
        self._sums[0] += total
        self._sums[1] += weight

    def compute(self) -> float:
        """The mean since the last `reset`, the same number on all ranks, each of which must call it; NaN without samples."""
        total, weight = sum_over_ranks(self._backend.control, "Mean.compute", self._sums)
        return total / weight if weight else float("nan")

    def reset(self) -> None:
        """Begin anew."""
        self._sums = [0.0, 0.0]


def _ndim(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _NUMPY() -> Any:
    import numpy

    return numpy.empty(0)
