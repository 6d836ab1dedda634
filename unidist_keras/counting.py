"""Keras' losses divide by what they count (samples, what is not masked, weights); here is how to learn what that was.

Private names of Keras that are replaced, in `keras.src.losses.loss`, while a loss of unidist is computed or traced:
`scale_loss_for_distribution` and `unscale_loss_for_distribution` (identities: unidist divides in the optimizer's `apply`, once,
for Keras' losses and users' alike) and `reduce_weighted_values` (to learn what a loss divides by).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.losses import loss as keras_loss

from unidist.errors import MissingDependencyError

_NAMES = ("scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_weighted_values")
SUM = "sum"  # in place of a denominator: the loss is a sum and divides by nothing


class _Replaced(threading.local):
    """What is done with a loss of Keras whose denominator isn't the number of samples; each replica has its own thread."""

    handler: Callable[[Any, Any], Any] | None = None


_replaced = _Replaced()
_lock = threading.Lock()
_inside = 0
_originals: dict[str, Any] = {}


def check_keras() -> None:
    """Raise MissingDependencyError when this Keras lacks a name that has to be replaced."""
    absent = [name for name in _NAMES if not hasattr(keras_loss, name)]
    if absent:
        raise MissingDependencyError(
            f"Keras {keras.__version__} has no {', '.join(absent)} in keras.src.losses.loss, by which unidist counts its losses; use "
            "Keras 3.10 to 3.15 or a newer unidist"
        )


@contextlib.contextmanager
def counted_losses(handler: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Keras' losses count locally inside; `handler(loss, denominator)` may change one that doesn't divide by its samples."""
    previous, _replaced.handler = _replaced.handler, handler
    _enter()
    try:
        yield
    finally:
        _leave()
        _replaced.handler = previous


def _enter() -> None:
    global _inside
    with _lock:
        if _inside == 0:
            _originals.update({name: getattr(keras_loss, name) for name in _NAMES})
            keras_loss.scale_loss_for_distribution = keras_loss.unscale_loss_for_distribution = lambda value: value
            keras_loss.reduce_weighted_values = _reduce_weighted_values
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            for name, original in _originals.items():
                setattr(keras_loss, name, original)


def _reduce_weighted_values(
    values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = "sum_over_batch_size", dtype: Any = None
) -> Any:
    loss = _originals["reduce_weighted_values"](values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    denominator = _denominator(sample_weight, mask, reduction, loss.dtype)
    if denominator is None or _replaced.handler is None or len(loss.shape):
        return loss
    return _replaced.handler(loss, denominator)


def _denominator(sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
    """What Keras divides by, up to a constant; None for the number of samples or nothing, SUM for a sum."""
    if reduction == "sum":
        return SUM
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        return keras.ops.sum(keras.ops.cast(mask, keras.backend.standardize_dtype(dtype)))
    if reduction == "mean_with_sample_weight" and (mask is not None or sample_weight is not None):
        weights = keras_loss.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
        return keras.ops.sum(keras.ops.cast(weights, keras.backend.standardize_dtype(dtype)))
    return None
