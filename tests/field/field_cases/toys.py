"""The toy of most cases: one weight, data 1 to n, targets twice as much, mean squared error, plain SGD."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.testing.bench import Bench

RATE = 0.01


def w1(bench: Bench, *, rate: float = RATE, weight: float = 1.0, **options: Any) -> tuple[Any, Any]:
    """The wrapped model of one weight, and its optimizer; options: of wrap_model."""
    model = bench.model("linear", {"0/kernel": np.full((1, 1), weight)}, **options)
    return model, bench.optimizer("plain", model, rate=rate)


def numbers(*values: float) -> tuple[Any, Any]:
    """Inputs (n, 1) and targets."""
    x = np.array(values, dtype=np.float64).reshape(-1, 1)
    return x, 2 * x


def weight_of(bench: Bench, model: Any) -> float:
    """The one weight."""
    return float(next(iter(bench.weights(model).values())).reshape(()))


def after_step(*values: float, rate: float = RATE) -> float:
    """The weight after one step from 1.0 on these inputs: 1 + 2 * rate * mean(x^2)."""
    return 1.0 + 2 * rate * float(np.mean(np.square(values)))


def once(step: Any, arrays: tuple[Any, Any], batch: int) -> None:
    """One pass over whole data."""
    for part in unidist.wrap_data(arrays, global_batch_size=batch):
        step(part)
