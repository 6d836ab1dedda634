"""Horovod's collectives that pass gradients back, eagerly and in graphs: the sum of what all ranks ask of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from unidist_tf.horovod_ops import gather_rows, name, sum_dense
from unidist_tf.tensors import as_dtype, rows_of


def all_reduce(tensor: tf.Tensor, op: str, ranks: Any) -> tf.Tensor:
    """The sum or mean of the ranks' tensors; each rank's gets what all ranks ask of the result."""
    factor = 1.0 / ranks.size() if op == "mean" else 1.0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(x: tf.Tensor) -> Any:
        (total,) = sum_dense([x], ranks=ranks)

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            (sent,) = sum_dense([asked], ranks=ranks)
            return sent * as_dtype(factor, asked.dtype)

        return total * as_dtype(factor, x.dtype), gradient

    return reduce(tensor)


def reduce_scatter(tensor: tf.Tensor, op: str, ranks: Any) -> tf.Tensor:
    """This rank's rows of the sum or mean; each rank's rows get what their owners ask of them."""
    factor = 1.0 / ranks.size() if op == "mean" else 1.0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scatter(x: tf.Tensor) -> Any:
        (total,) = sum_dense([x], ranks=ranks)
        begin, size = rows_of(tf.shape(x)[0], ranks.rank(), ranks.size())

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            sent = gather_rows(asked, ranks)
            return sent * as_dtype(factor, asked.dtype)

        return total[begin : begin + size] * as_dtype(factor, x.dtype), gradient

    return scatter(tensor)


def all_gather(tensor: tf.Tensor, ranks: Any) -> tf.Tensor:
    """The ranks' rows joined; each rank's rows get what all ranks ask of them."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(x: tf.Tensor) -> Any:
        counts = gather_rows(tf.shape(x)[:1], ranks)

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            begin = tf.reduce_sum(counts[: ranks.rank()])
            (sent,) = sum_dense([asked], ranks=ranks)
            return sent[begin : begin + counts[ranks.rank()]]

        return gather_rows(x, ranks), gradient

    return gather(tensor)


def all_to_all(tensor: tf.Tensor, sizes: Sequence[int] | None, ranks: Any) -> tf.Tensor:
    """The rows that the ranks have for this one; what is asked of them goes back where they came from."""
    if sizes is None:
        splits = tf.stack([rows_of(tf.shape(tensor)[0], part, ranks.size())[1] for part in range(ranks.size())])
    else:
        splits = tf.constant(list(sizes), tf.int32)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(x: tf.Tensor) -> Any:
        moved, received = _move(x, splits, ranks)

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            return _move(asked, received, ranks)[0]

        return moved, gradient

    return exchange(tensor)


def _move(tensor: tf.Tensor, splits: tf.Tensor, ranks: Any) -> tuple[tf.Tensor, tf.Tensor]:
    wide = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
    moved, received = hvd.alltoall(wide, splits, name=name("exchange"), ignore_name_scope=True, process_set=ranks)
    moved.set_shape([None, *tensor.shape[1:]])
    return tf.cast(moved, tensor.dtype), received
