"""A user's loss on TensorFlow in one form, (value, weight)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from unidist import frameworks
from unidist.errors import UnsupportedError
from unidist.nest import map_nest
from unidist_keras.counting import SUM, counted_losses
from unidist_tf.precision import widened
from unidist_tf.tensors import as_dtype


class Counted(NamedTuple):
    """A scalar mean over samples with weight None, or a scalar total and the weight that it is to be divided by."""

    value: tf.Tensor
    weight: tf.Tensor | None


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
            outputs = map_nest(widened, self.outputs(inputs, training=True))
            counted = self.of_outputs(outputs, targets, sample_weight)
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
            total = widened(tf.convert_to_tensor(result[0]))
            return Counted(total, tf.stop_gradient(as_dtype(result[1], total.dtype)))
        value = widened(tf.convert_to_tensor(result))
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
