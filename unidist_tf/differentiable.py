"""A collective through which gradients flow as on one device, whatever each replica's loss will count later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from unidist_tf.tensors import as_dtype


def counted(collective: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor, own: Any) -> tf.Tensor:
    """`collective(tensor)`, whose gradient adds what all replicas ask of the result, each by how it counts.

    own: what this replica's gradients will be multiplied by later, a number or 0-d tensor. What the collective passes back is the sum of
    all replicas' by their own; it is divided by it here, since it will be multiplied by it later. With 0 nothing is asked, NaN or not.
    """
    if isinstance(own, (int, float)) and own == 1.0:
        return collective(tensor)
    return _multiplied(collective(_divided(tensor, own)), own)


def _multiplied(tensor: tf.Tensor, own: Any) -> tf.Tensor:
    """The identity; its gradient is multiplied."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(x: tf.Tensor) -> Any:
        def gradient(asked: tf.Tensor) -> tf.Tensor:
            return tf.where(as_dtype(own, tf.float64) > 0, asked * as_dtype(own, asked.dtype), tf.zeros_like(asked))

        return tf.identity(x), gradient

    return identity(tensor)


def _divided(tensor: tf.Tensor, own: Any) -> tf.Tensor:
    """The identity; its gradient is divided, and 0 where nothing will count."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda asked: tf.math.divide_no_nan(asked, as_dtype(own, asked.dtype))

    return identity(tensor)
