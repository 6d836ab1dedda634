"""BatchNorm over the global batch in a job of several processes: each layer's moments are replaced, its class and config stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from unidist_keras.on_instance import put

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


def layers(model: Any) -> Iterator[Any]:
    """The BatchNormalization layers of a Keras model or layer."""
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else []:
        if isinstance(layer, keras.layers.BatchNormalization):
            yield layer


def synchronise(model: Any, backend: TFBackend) -> None:
    """Give the layers that are to be synchronised moments over the samples of all replicas of all processes."""
    for layer in layers(model):
        if layer.synchronized:
            put(layer, "_moments", _Moments(layer, backend))


class _Moments:
    """In place of a layer's own; mean and biased variance, in the dtype in which the layer computes."""

    def __init__(self, layer: Any, backend: TFBackend) -> None:
        self._layer = layer
        self._backend = backend

    def __call__(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        axes = self._layer._reduction_axes
        counts = tf.ones_like(inputs) if mask is None else tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., None], tf.shape(inputs))
        rows = self._backend.counting.rows
        if rows is not None:  # a borrowed row does not count
            counts = counts * tf.cast(rows > 0, inputs.dtype)
        total, count = self._sums([self._counted(inputs, counts), counts], axes)
        mean = tf.math.divide_no_nan(total, count)
        (squares,) = self._sums([self._counted(tf.square(inputs - mean), counts)], axes)
        return tf.squeeze(mean, axes), tf.squeeze(tf.math.divide_no_nan(squares, count), axes)

    @staticmethod
    def _counted(values: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        return tf.where(counts > 0, values, tf.zeros_like(values))

    def _sums(self, values: list[tf.Tensor], axes: list[int]) -> list[tf.Tensor]:
        own = tf.stack([tf.reduce_sum(value, axes, keepdims=True) for value in values])
        return tf.unstack(self._backend._grad_collective("all_reduce", own, op="sum"))  # type: ignore[no-any-return]
