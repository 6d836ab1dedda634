"""Horovod's operations with names that are the same on every rank, and every dtype exactly."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from unidist_tf.tensors import as_bytes, from_bytes, widen

_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max, "min": hvd.Min, "product": hvd.Product}
_REDUCE = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max, "min": tf.reduce_min, "product": tf.reduce_prod}
_INT32 = 2**31 - 1  # what Horovod counts the pieces of an alltoall with
ALL = hvd.global_process_set
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


def sum_dense(tensors: Sequence[tf.Tensor], fp16: bool = False, ranks: Any = ALL) -> list[tf.Tensor]:
    """Each tensor summed over the ranks, those of one dtype in one grouped operation; `fp16`: travelling as half floats."""
    sent = [tf.cast(t, tf.float16) if fp16 and t.dtype in (tf.float32, tf.float64) and t.shape.rank else t for t in tensors]
    results: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in sent):
        places = [i for i, t in enumerate(sent) if t.dtype == dtype]
        results.update(zip(places, _sum_group([sent[i] for i in places], ranks)))
    return [tf.cast(results[i], t.dtype) for i, t in enumerate(tensors)]


def _sum_group(tensors: list[tf.Tensor], ranks: Any) -> list[tf.Tensor]:
    if tensors[0].dtype not in _REDUCED:  # bfloat16
        return [tf.cast(t, tensors[0].dtype) for t in _sum_group([tf.cast(t, tf.float32) for t in tensors], ranks)]
    summed = hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name("sum"), ignore_name_scope=True, process_set=ranks)
    for result, tensor in zip(summed, tensors):
        result.set_shape(tensor.shape)
    return list(summed)


def sum_sparse(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The rows of all ranks: a sparse sum."""
    return tf.IndexedSlices(gather_rows(gradient.values), gather_rows(gradient.indices), gradient.dense_shape)


def gather_rows(tensor: tf.Tensor, ranks: Any = ALL) -> tf.Tensor:
    """The ranks' rows joined, also inside a graph."""
    if tensor.dtype not in _MOVED:  # bfloat16 values of sparse gradients
        return tf.cast(gather_rows(tf.cast(tensor, tf.float32), ranks), tensor.dtype)
    return hvd.allgather(tensor, name=name("gather"), ignore_name_scope=True, process_set=ranks)


def all_reduce(tensor: tf.Tensor, op: str, ranks: Any = ALL) -> tf.Tensor:
    """Over the ranks of a process set, eagerly, for any numeric dtype: some travel wider, the rest is gathered and reduced here."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    if tensor.dtype.is_complex or tensor.dtype == tf.uint64:
        return reduce_rows(all_gather(tensor[None], [1] * ranks.size(), ranks), op)
    flat = hvd.allreduce(tf.reshape(_wide(tensor), [-1]), op=_OPS[op], name=name(op), process_set=ranks)
    return tf.cast(tf.reshape(flat, tensor.shape), tensor.dtype)


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """For arithmetic; bool, where max is any and min is all, as int32."""
    return tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else widen(tensor)


def reduce_rows(rows: tf.Tensor, op: str) -> tf.Tensor:
    """(n, ...) reduced over its first axis, by the rules of `all_reduce`."""
    wide = rows if rows.dtype == tf.uint64 else _wide(rows)
    if rows.dtype == tf.uint64 and op in ("max", "min"):  # TensorFlow has no kernel for it
        signed = tf.bitcast(tf.bitwise.bitwise_xor(rows, tf.constant(2**63, tf.uint64)), tf.int64)
        return tf.bitwise.bitwise_xor(tf.bitcast(_REDUCE[op](signed, axis=0), tf.uint64), tf.constant(2**63, tf.uint64))
    return tf.cast(_REDUCE[op](wide, axis=0), rows.dtype)


def reduce_scatter(tensor: tf.Tensor, op: str, sizes: Sequence[int], ranks: Any = ALL) -> tf.Tensor:
    """This rank's rows of what `all_reduce` gives, eagerly: everyone's rows for this rank arrive and are reduced here."""
    rows = all_to_all(tensor, [sizes] * ranks.size(), ranks)
    return reduce_rows(tf.reshape(rows, (ranks.size(), sizes[ranks.rank()], *tensor.shape[1:])), op)


def all_gather(tensor: tf.Tensor, first_dims: Sequence[int], ranks: Any = ALL) -> tf.Tensor:
    """The ranks' tensors joined along the first axis, eagerly, for any dtype."""
    shape = (sum(first_dims), *tensor.shape[1:])
    if 0 in shape:
        return tf.zeros(shape, tensor.dtype)
    if tensor.dtype in _MOVED:
        return hvd.allgather(tensor, name=name("gather"), process_set=ranks)
    return from_bytes(hvd.allgather(as_bytes(tensor), name=name("gather"), process_set=ranks), tensor.dtype, shape)


def all_to_all(tensor: tf.Tensor, table: Sequence[Sequence[int]], ranks: Any = ALL) -> tf.Tensor:
    """The rows for this rank, in rank order, eagerly, for any dtype; `table[a][b]` rows go from the a-th rank to the b-th."""
    place = ranks.rank()
    shape = (sum(sizes[place] for sizes in table), *tensor.shape[1:])
    row = tensor.dtype.size * math.prod(tensor.shape[1:])
    largest = row * max(map(max, table))
    if largest == 0:
        return tf.zeros(shape, tensor.dtype)
    if largest > _INT32:
        joined = all_gather(tensor, [sum(sizes) for sizes in table], ranks)
        begins = [sum(map(sum, table[:a])) + sum(sizes[:place]) for a, sizes in enumerate(table)]
        return tf.concat([joined[begin : begin + sizes[place]] for begin, sizes in zip(begins, table)], 0)
    splits = tf.constant([row * n for n in table[place]], tf.int32)
    moved, _ = hvd.alltoall(as_bytes(tensor), splits, name=name("exchange"), process_set=ranks)
    return from_bytes(moved, tensor.dtype, shape)


def broadcast(tensor: tf.Tensor, root: int, ranks: Any = ALL) -> tf.Tensor:
    """Rank `root`'s tensor, eagerly, for any dtype."""
    if tensor.shape.num_elements() == 0:
        return tf.identity(tensor)
    if tensor.dtype in _MOVED:
        return hvd.broadcast(tensor, root, name=name("broadcast"), process_set=ranks)
    moved = hvd.broadcast(as_bytes(tensor), root, name=name("broadcast"), process_set=ranks)
    return from_bytes(moved, tensor.dtype, tuple(tensor.shape))
