"""Horovod's operations with names that are the same on every rank, and every dtype exactly."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from unidist_tf.tensors import as_bytes, as_dtype, from_bytes, widen

_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max, "min": hvd.Min, "product": hvd.Product}
_REDUCED = (tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_MOVED = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool)

# Horovod meets operations by name, and takes it from tensors, in which Keras counts layers per process. So operations are
# counted from the start of each graph: a rank that traces once more than another has the same names again.
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def name(kind: str) -> str:
    """The name of the next operation."""
    if tf.executing_eagerly():
        return f"unidist.{kind}"
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    _counts[graph] = _counts.get(graph, -1) + 1
    return f"unidist.{kind}.{_counts[graph]}"


def sum_dense(tensors: Sequence[tf.Tensor], fp16: bool = False) -> list[tf.Tensor]:
    """Each tensor summed over all ranks, those of one dtype in one grouped operation; `fp16`: travelling as half floats."""
    sent = [tf.cast(t, tf.float16) if fp16 and t.dtype in (tf.float32, tf.float64) and t.shape.rank else t for t in tensors]
    results: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in sent):
        places = [i for i, t in enumerate(sent) if t.dtype == dtype]
        results.update(zip(places, _sum_group([sent[i] for i in places])))
    return [tf.cast(results[i], t.dtype) for i, t in enumerate(tensors)]


def _sum_group(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    if tensors[0].dtype not in _REDUCED:  # bfloat16
        return [tf.cast(t, tensors[0].dtype) for t in _sum_group([tf.cast(t, tf.float32) for t in tensors])]
    summed = hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name("sum"), ignore_name_scope=True)
    for result, tensor in zip(summed, tensors):
        result.set_shape(tensor.shape)
    return list(summed)


def sum_sparse(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The rows of all ranks: a sparse sum."""
    return tf.IndexedSlices(gather_rows(gradient.values), gather_rows(gradient.indices), gradient.dense_shape)


def gather_rows(tensor: tf.Tensor) -> tf.Tensor:
    """The ranks' rows joined, also inside a graph."""
    if tensor.dtype not in _MOVED:  # bfloat16 values of sparse gradients
        return tf.cast(gather_rows(tf.cast(tensor, tf.float32)), tensor.dtype)
    return hvd.allgather(tensor, name=name("gather"), ignore_name_scope=True)


def all_reduce(tensor: tf.Tensor, op: str) -> tf.Tensor:
    """Over all ranks, eagerly, for any numeric dtype: some travel as a wider one, the rest is gathered and reduced here."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    if tensor.dtype.is_complex or tensor.dtype == tf.uint64:
        return _reduce_here(tensor, op)
    wide = widen(tensor)
    if wide.dtype == tf.uint8:  # bool, where max is any and min is all
        wide = tf.cast(wide, tf.int32)
    flat = hvd.allreduce(tf.reshape(wide, [-1]), op=_OPS[op], name=name(op))
    return tf.cast(tf.reshape(flat, tensor.shape), tensor.dtype)


def _reduce_here(tensor: tf.Tensor, op: str) -> tf.Tensor:
    rows = all_gather(tensor[None], [1] * hvd.size())
    functions = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max, "min": tf.reduce_min, "product": tf.reduce_prod}
    if tensor.dtype.is_complex and op in ("max", "min"):
        raise TypeError(f"complex numbers have no order, so no {op}")
    return functions[op](rows, axis=0)


def all_gather(tensor: tf.Tensor, first_dims: Sequence[int]) -> tf.Tensor:
    """The ranks' tensors joined along the first axis, eagerly, for any dtype."""
    shape = (sum(first_dims), *tensor.shape[1:])
    if 0 in shape:
        return tf.zeros(shape, tensor.dtype)
    if tensor.dtype in _MOVED:
        return hvd.allgather(tensor, name=name("gather"))
    return from_bytes(hvd.allgather(as_bytes(tensor), name=name("gather")), tensor.dtype, shape)


def broadcast(tensor: tf.Tensor, root: int) -> tf.Tensor:
    """Rank `root`'s tensor, eagerly, for any dtype."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    if tensor.dtype in _MOVED:
        return hvd.broadcast(tensor, root, name=name("broadcast"))
    return from_bytes(hvd.broadcast(as_bytes(tensor), root, name=name("broadcast")), tensor.dtype, tuple(tensor.shape))


def differentiable_reduce(tensor: tf.Tensor, op: str) -> tf.Tensor:
    """The sum or mean of the ranks' tensors; each rank's gets what all ranks ask of the result."""
    factor = 1.0 / hvd.size() if op == "mean" else 1.0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(x: tf.Tensor) -> Any:
        (total,) = sum_dense([x])

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            return sum_dense([asked])[0] * as_dtype(factor, asked.dtype)

        return total * as_dtype(factor, x.dtype), gradient

    return reduce(tensor)


def differentiable_gather(tensor: tf.Tensor) -> tf.Tensor:
    """The ranks' rows joined; each rank's rows get what all ranks ask of them."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(x: tf.Tensor) -> Any:
        counts = gather_rows(tf.shape(x)[:1])

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            begin = tf.reduce_sum(counts[: hvd.rank()])
            return sum_dense([asked])[0][begin : begin + counts[hvd.rank()]]

        return gather_rows(x), gradient

    return gather(tensor)
