"""A user's loss in one form, (value, weight); and Keras' losses, which divide by what they count, made to count over all replicas.

Private names of Keras that are replaced, in `keras.src.losses.loss`, while a step of unidist is traced:
`scale_loss_for_distribution` and `unscale_loss_for_distribution` (identities: unidist divides in the optimizer's `apply`, once,
for Keras' losses and users' alike) and `reduce_weighted_values` (to learn what a loss divides by).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from unidist import frameworks
from unidist.errors import MissingDependencyError, UnsupportedError
from unidist_tf.tensors import as_dtype

_NAMES = ("scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_weighted_values")
SUM = "sum"  # in place of a denominator: the loss is a sum and divides by nothing


class Counted(NamedTuple):
    """A scalar mean over samples with weight None, or a scalar total and the weight that it is to be divided by."""

    value: tf.Tensor
    weight: tf.Tensor | None


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
    if denominator is None or _replaced.handler is None or loss.shape.rank:
        return loss
    return _replaced.handler(loss, denominator)


def _denominator(sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
    """What Keras divides by, up to a constant; None for the number of samples or nothing, SUM for a sum."""
    if reduction == "sum":
        return SUM
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    if reduction == "mean_with_sample_weight" and (mask is not None or sample_weight is not None):
        weights = keras_loss.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
        return tf.reduce_sum(tf.cast(weights, dtype))
    return None


class Losses:
    """The loss of `make_train_step` or `evaluate` over a model's outputs."""

    def __init__(self, model: Any, loss: Any = None, compute_loss: Any = None) -> None:
        self._model = model
        self._loss = keras.losses.get(loss) if isinstance(loss, str) else loss
        self._compute_loss = compute_loss
        self._keras_model = frameworks.is_keras(model)

    def of_batch(self, batch: Any) -> Counted:
        """Of a training batch, with what Keras layers and regularisers add."""
        if self._compute_loss is not None:
            counted = self._reduced(self._computed(batch), None)
        else:
            inputs, targets, sample_weight = unpack(batch)
            counted = self.of_outputs(self.outputs(inputs, training=True), targets, sample_weight)
        penalties = self._model.losses if self._keras_model else []
        if not penalties:
            return counted
        added = tf.add_n([tf.cast(tf.reduce_sum(p), counted.value.dtype) for p in penalties])
        return Counted(counted.value + (added if counted.weight is None else added * counted.weight), counted.weight)

    def outputs(self, inputs: Any, *, training: bool) -> Any:
        """A tuple is positional and a dict keywords for a `tf.Module`, one structure for a Keras model."""
        if self._keras_model:
            return self._model(inputs, training=training)
        if isinstance(inputs, Mapping):
            return self._model(**inputs)
        return self._model(*inputs) if isinstance(inputs, (tuple, list)) else self._model(inputs)

    def of_outputs(self, outputs: Any, targets: Any, sample_weight: Any) -> Counted:
        """Of outputs that are there."""
        if isinstance(self._loss, keras.Loss):
            return self._of_keras(outputs, targets, sample_weight)
        if getattr(self._loss, "__module__", "").startswith("keras."):  # Keras' functions take the targets first
            return self._reduced(self._loss(targets, outputs), sample_weight)
        return self._reduced(self._loss(outputs, targets), sample_weight)

    def _of_keras(self, outputs: Any, targets: Any, sample_weight: Any) -> Counted:
        found: list[Any] = []

        def note(loss: Any, denominator: Any) -> Any:
            found.append(denominator)
            return loss

        with counted_losses(note):
            value = self._loss(targets, outputs, sample_weight=sample_weight)
        if SUM in [d for d in found if isinstance(d, str)]:
            raise UnsupportedError(
                f"the loss {self._loss.name!r} has reduction='sum', which counts a batch by its size; use 'sum_over_batch_size', or a "
                "function that returns (total, weight)"
            )
        if not found:
            return self._reduced(value, None)
        return Counted(value * found[0], tf.cast(found[0], value.dtype))

    def _computed(self, batch: Any) -> Any:
        def refuse(loss: Any, denominator: Any) -> Any:
            raise UnsupportedError(
                "compute_loss calls a Keras loss that doesn't divide by the number of samples (a mask, a sum, sums of weights), so it "
                "can't be known what the result is a mean over; return (total, weight) from compute_loss"
            )

        with counted_losses(refuse):
            return self._compute_loss(self._model, batch)

    def _reduced(self, result: Any, sample_weight: Any) -> Counted:
        if isinstance(result, tuple):
            total = tf.convert_to_tensor(result[0])
            return Counted(total, tf.stop_gradient(as_dtype(result[1], total.dtype)))
        value = tf.convert_to_tensor(result)
        if value.shape.rank == 0:
            if sample_weight is not None:
                raise UnsupportedError(
                    "the batch has sample weights, and the loss returned a scalar, to which they can't be applied; return one "
                    "value per sample or (total, weight)"
                )
            return Counted(value, None)
        values = tf.reduce_mean(value, axis=range(1, value.shape.rank))
        if sample_weight is not None:
            values = values * tf.cast(sample_weight, values.dtype)
        return Counted(tf.reduce_mean(values), None)


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """(inputs, targets, sample_weight) of a batch, each None where the batch has none."""
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2, 3) and not hasattr(batch, "_fields"):
        return (*batch, None, None)[:3]
    return batch, None, None
