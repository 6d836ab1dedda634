"""Losses in NumPy float64: one value per sample, its gradient, and the two ways to make a scalar of them.

A scalar loss is always total / weight, so that batches, shares of a batch and accumulated batches add up exactly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from unidist.testing.golden.layers import Array

Denominator: TypeAlias = Literal["samples", "weights"]


@dataclass(frozen=True)
class Loss:
    """`values(outputs, targets)`: losses per sample (n,); `gradient`: d values[i] / d outputs[i], like outputs."""

    name: str
    values: Callable[[Array, Array], Array]
    gradient: Callable[[Array, Array], Array]


def _mse_values(outputs: Array, targets: Array) -> Array:
    values: Array = ((outputs - targets) ** 2).mean(axis=1)
    return values


def _mse_gradient(outputs: Array, targets: Array) -> Array:
    gradient: Array = 2.0 * (outputs - targets) / outputs.shape[1]
    return gradient


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_softmax: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_softmax


def _cross_entropy_values(outputs: Array, targets: Array) -> Array:
    values: Array = -_log_softmax(outputs)[np.arange(len(targets)), targets]
    return values


def _cross_entropy_gradient(outputs: Array, targets: Array) -> Array:
    gradient = np.exp(_log_softmax(outputs))
    gradient[np.arange(len(targets)), targets] -= 1.0
    return gradient


MSE = Loss("mse", _mse_values, _mse_gradient)
"""Mean of the squared errors over a sample's outputs; outputs and targets (n, outputs), float64."""

CROSS_ENTROPY = Loss("cross_entropy", _cross_entropy_values, _cross_entropy_gradient)
"""Softmax cross entropy from logits (n, classes) with targets (n,), int64."""


def mean(values: Array) -> float:
    """The mean over samples; values (n,)."""
    return float(values.mean())


def total_and_weight(values: Array, sample_weight: Array | None = None, denominator: Denominator = "samples") -> tuple[float, float]:
    """(sum of w*l, weight); the scalar loss is total / weight. values, sample_weight: (n,); no weights are ones.

    "samples" divides by n, as Keras does (`sum_over_batch_size`, keras/src/losses/loss.py); "weights" by the sum of the
    weights, as torch's class weights and `ignore_index` and token-normalised losses do.
    """
    weights = np.ones(len(values)) if sample_weight is None else sample_weight
    divisor = {"samples": float(len(values)), "weights": float(weights.sum())}[denominator]
    return float((weights * values).sum()), divisor


def class_sample_weights(targets: Array, class_weights: Mapping[int, float]) -> Array:
    """Weights (n,) for targets (n,): each sample's class weight; weight 0 for classes not named (an `ignore_index`)."""
    return np.array([class_weights.get(int(target), 0.0) for target in targets], dtype=np.float64)
