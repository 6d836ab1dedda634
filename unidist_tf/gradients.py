"""Lists of gradients, dense or sparse, some of them None: scaled, dropped, clipped; and which of them are reduced already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from unidist_tf.tensors import as_dtype

Gradients = Sequence[Any]


def each(function: Callable[[tf.Tensor], tf.Tensor], gradients: Gradients) -> list[Any]:
    """`function` applied to the values of every gradient that there is; indices stay."""
    return [None if g is None else _on_values(function, g) for g in gradients]


def _on_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(tf.convert_to_tensor(gradient))


def scaled(gradients: Gradients, factor: Any) -> list[Any]:
    """Times a number or 0-d tensor. A factor of 0 gives zeros also where a gradient is NaN."""
    if isinstance(factor, (int, float)):
        if factor == 1.0:
            return list(gradients)
        if factor == 0.0:
            return each(tf.zeros_like, gradients)
        return each(lambda g: g * as_dtype(factor, g.dtype), gradients)
    return each(lambda g: tf.where(factor > 0, g * as_dtype(factor, g.dtype), tf.zeros_like(g)), gradients)


def divided(gradients: Gradients, total: Any) -> list[Any]:
    """Over a 0-d tensor; zeros where that is 0."""
    return each(lambda g: tf.math.divide_no_nan(g, as_dtype(total, g.dtype)), gradients)


def kept_if(counts: Any, gradients: Gradients) -> list[Any]:
    """The gradients themselves, or zeros of a share that does not count; no arithmetic on those that do."""
    present = [g for g in gradients if g is not None]
    if not present:
        return list(gradients)
    kept = tf.cond(counts, lambda: [_tensors(g) for g in present], lambda: [_tensors(_on_values(tf.zeros_like, g)) for g in present])
    found = iter([_like(tensors, g) for tensors, g in zip(kept, present)])
    return [None if g is None else next(found) for g in gradients]


def _tensors(gradient: Any) -> tuple[tf.Tensor, ...]:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return (tf.identity(gradient),)


def _like(tensors: Any, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tensors[0], tensors[1], gradient.dense_shape)
    return tensors[0]


def merged_rows(gradient: Any) -> Any:
    """A sparse gradient with every row once: repeated rows are summed, as its norm and clipping by value need."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def clip(gradients: Gradients, max_norm: float | None, max_value: float | None, scale: Any = None) -> tuple[list[Any], Any]:
    """Clipped reduced gradients, and their global norm before; None when no bound is given.

    scale: what the gradients are multiplied by and will be divided by after; the bounds and the norm are of those without it.
    """
    if scale is not None and (max_norm is not None or max_value is not None):
        return _clip_scaled(gradients, max_norm, max_value, scale)
    if max_norm is None and max_value is None:
        return list(gradients), None
    whole = [merged_rows(g) for g in gradients]
    norm = tf.linalg.global_norm([g for g in whole if g is not None])
    if max_norm is not None:
        factor = as_dtype(max_norm, norm.dtype) / tf.maximum(norm, as_dtype(max_norm, norm.dtype))
        whole = each(lambda g: g * as_dtype(factor, g.dtype), whole)
    if max_value is not None:
        whole = each(lambda g: tf.clip_by_value(g, as_dtype(-max_value, g.dtype), as_dtype(max_value, g.dtype)), whole)
    return whole, norm


def _clip_scaled(gradients: Gradients, max_norm: float | None, max_value: float | None, scale: Any) -> tuple[list[Any], Any]:
    """What is not finite stays so, also where it would be clipped: a LossScaleOptimizer has to see it."""
    unscaled = each(lambda g: g / as_dtype(scale, g.dtype), gradients)
    clipped, norm = clip(unscaled, max_norm, max_value)
    finite = tf.math.is_finite(norm)
    return each(lambda g: tf.where(finite, g * as_dtype(scale, g.dtype), as_dtype(float("nan"), g.dtype)), clipped), norm


def cast_weight(weight: Any, gradients: Gradients) -> tf.Tensor:
    """A weight as a 0-d tensor that sums exactly: float64 beside float64 gradients, else float32."""
    wide = any(g is not None and g.dtype == tf.float64 for g in gradients)
    return as_dtype(weight, tf.float64 if wide else tf.float32)


class Reduced(threading.local):
    """Which gradients `reduce_gradients` has given out and `apply` has not seen yet, so that they are not exchanged twice.

    What is applied may be made of them (clipped), so they are told by shape and dtype; the very ones that went in are not.
    In doubt they are reduced again, which changes nothing: all replicas hold the same. MirroredStrategy runs each
    replica in a thread of its own.
    """

    _LIMIT = 8

    def __init__(self) -> None:
        self._known: list[tuple[Gradients, list[Any]]] = []

    def note(self, given: Gradients, reduced: Gradients) -> None:
        """`given` was reduced to `reduced`."""
        signature = _signature(reduced)
        others = [entry for entry in self._known if entry[1] != signature]
        self._known = [*others[-self._LIMIT :], (list(given), signature)]

    def take(self, gradients: Gradients) -> bool:
        """Whether these are reduced already; forgets it."""
        signature = _signature(gradients)
        for index, (given, known) in enumerate(self._known):
            if known == signature:
                del self._known[index]
                return not any(a is b for a, b in zip(given, gradients) if a is not None)
        return False


def _signature(gradients: Gradients) -> list[Any]:
    """Shapes and dtypes, and the graph that they belong to: a trace's gradients are not another's."""
    rows: list[Any] = [None if g is None else (str(g.shape), g.dtype.name) for g in gradients]
    return [*rows, None if tf.executing_eagerly() else id(tf.compat.v1.get_default_graph())]
