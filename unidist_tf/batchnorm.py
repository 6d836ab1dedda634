"""BatchNorm over the global batch: each layer's own moments are replaced by sums over all replicas; class and config stay Keras'."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from unidist.errors import UnsupportedError
from unidist_keras.on_instance import is_put, put

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


def layers_of(model: Any) -> list[Any]:
    """The BatchNormalization layers of a Keras model; a `tf.Module` has none."""
    layers = model._flatten_layers() if isinstance(model, keras.Layer) else []
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def synchronise(model: Any, backend: TFBackend, *, every: bool) -> None:
    """Give BatchNormalization layers moments over all replicas: every one, or those that were built with synchronized=True.

    Raises UnsupportedError for a `tf.Module`, whose layers unidist does not know.
    """
    if every and not isinstance(model, keras.Layer):
        raise UnsupportedError("sync_batchnorm works on Keras' BatchNormalization layers, not on a tf.Module's own normalisation")
    for layer in layers_of(model):
        if every or layer.synchronized:
            put(layer, "_moments", functools.partial(_moments, backend, layer))


def alone(model: Any) -> list[Any]:
    """The layers that normalise over the replica's share."""
    return [layer for layer in layers_of(model) if not is_put(layer, "_moments")]


def _moments(backend: TFBackend, layer: Any, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and biased variance (channels,) over all replicas' samples, with gradients; a borrowed sample does not count.

    mask: of time steps, as Keras has it; what is masked does not count, and Keras adds its epsilon to the count.
    """
    axes = layer._reduction_axes
    per_channel = [1] * inputs.shape.rank
    per_channel[layer.axis] = -1
    there = None if mask is None else tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))

    def summed(values: tf.Tensor, *counts: tf.Tensor) -> tf.Tensor:
        kept = values if there is None else tf.where(there, values, tf.zeros_like(values))
        local = tf.concat([tf.reduce_sum(kept, axes), *[count[None] for count in counts]], 0)
        counting = backend.counting.rows
        local = local if counting is None else tf.where(counting > 0, local, tf.zeros_like(local))
        return backend._grad_collective("all_reduce", local, op="sum")

    sums = summed(inputs, _count(layer, inputs, mask))
    count = tf.stop_gradient(sums[-1]) + (0.0 if mask is None else keras.config.epsilon())
    mean = tf.math.divide_no_nan(sums[:-1], count)
    variance = tf.math.divide_no_nan(summed(tf.square(inputs - tf.reshape(mean, per_channel))), count)
    return mean, variance


def _count(layer: Any, inputs: tf.Tensor, mask: Any) -> tf.Tensor:
    """Values of one channel on this replica."""
    if mask is not None:
        return tf.reduce_sum(tf.cast(tf.cast(mask, tf.bool), inputs.dtype))
    return tf.cast(tf.size(inputs) // tf.shape(inputs)[layer.axis], inputs.dtype)
