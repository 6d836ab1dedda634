"""Horovod's collectives through which gradients flow as on one device, eagerly and in graphs; mirrored's have their own.

The total loss is the mean of the ranks' losses, each by how its share counts. A rank's gradient is multiplied by its own
`scale` later, when it is applied; so what is asked of another rank travels multiplied by this one's, and arrives divided by that one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from unidist_tf.horovod_ops import gather_rows, name, sum_dense
from unidist_tf.tensors import as_dtype, rows_of


def all_reduce(tensor: tf.Tensor, op: str, scale: Any, ranks: Any) -> tf.Tensor:
    """The sum or mean of the ranks' tensors; each rank's gets what all ranks ask of the result."""
    factor = 1.0 / ranks.size() if op == "mean" else 1.0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(x: tf.Tensor) -> Any:
        (total,) = sum_dense([x], ranks=ranks)

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            (sent,) = sum_dense([_sent(asked, scale)], ranks=ranks)
            return _arrived(sent, scale) * as_dtype(factor, asked.dtype)

        return total * as_dtype(factor, x.dtype), gradient

    return reduce(tensor)


def reduce_scatter(tensor: tf.Tensor, op: str, scale: Any, ranks: Any) -> tf.Tensor:
    """This rank's rows of the sum or mean; each rank's rows get what their owners ask of them."""
    factor = 1.0 / ranks.size() if op == "mean" else 1.0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scatter(x: tf.Tensor) -> Any:
        (total,) = sum_dense([x], ranks=ranks)
        begin, size = rows_of(tf.shape(x)[0], ranks.rank(), ranks.size())

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            sent = gather_rows(_sent(asked, scale), ranks)
            return _arrived(sent, scale) * as_dtype(factor, asked.dtype)

        return total[begin : begin + size] * as_dtype(factor, x.dtype), gradient

    return scatter(tensor)


def all_gather(tensor: tf.Tensor, scale: Any, ranks: Any) -> tf.Tensor:
    """The ranks' rows joined; each rank's rows get what all ranks ask of them."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(x: tf.Tensor) -> Any:
        counts = gather_rows(tf.shape(x)[:1], ranks)

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            begin = tf.reduce_sum(counts[: ranks.rank()])
            (sent,) = sum_dense([_sent(asked, scale)], ranks=ranks)
            return _arrived(sent, scale)[begin : begin + counts[ranks.rank()]]

        return gather_rows(x, ranks), gradient

    return gather(tensor)


def all_to_all(tensor: tf.Tensor, sizes: Sequence[int] | None, scale: Any, ranks: Any) -> tf.Tensor:
    """The rows that the ranks have for this one; what is asked of them goes back where they came from."""
    if sizes is None:
        splits = tf.stack([rows_of(tf.shape(tensor)[0], part, ranks.size())[1] for part in range(ranks.size())])
    else:
        splits = tf.constant(list(sizes), tf.int32)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(x: tf.Tensor) -> Any:
        moved, received = _move(x, splits, ranks)

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            return _arrived(_move(_sent(asked, scale), received, ranks)[0], scale)

        return moved, gradient

    return exchange(tensor)


def _move(tensor: tf.Tensor, splits: tf.Tensor, ranks: Any) -> tuple[tf.Tensor, tf.Tensor]:
    wide = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
    moved, received = hvd.alltoall(wide, splits, name=name("exchange"), ignore_name_scope=True, process_set=ranks)
    moved.set_shape([None, *tensor.shape[1:]])
    return tf.cast(moved, tensor.dtype), received


def _plain(scale: Any) -> bool:
    return isinstance(scale, float) and scale == 1.0


def _sent(gradient: tf.Tensor, scale: Any) -> tf.Tensor:
    return gradient if _plain(scale) else gradient * as_dtype(scale, gradient.dtype)


def _arrived(gradient: tf.Tensor, scale: Any) -> tf.Tensor:
    return gradient if _plain(scale) else tf.math.divide_no_nan(gradient, as_dtype(scale, gradient.dtype))
