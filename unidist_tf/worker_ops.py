"""Sums over processes by TensorFlow's collective operations, in graphs and eagerly; every other collective is made of them.

A rank's rows or bytes stand at their place in zeros, and the sum is what all ranks hold: exact for integers, of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import tensorflow as tf

from unidist_tf.tensors import as_bytes, as_dtype, from_bytes, widen

_GROUP, _HOST_GROUP = 1000, 1001  # those of MultiWorkerMirroredStrategy begin at 1
_SIZE_BITS = 26  # elements of one operation
_MERGES = {"sum": ("Add", 0), "max": ("Max", 1), "min": ("Min", 2), "product": ("Mul", 3)}
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


class WorkerOps:
    """What `size` processes do together, each on its `device`, integers on its host; an operation fails after `timeout` seconds."""

    def __init__(self, rank: int, size: int, device: str, host: str, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._device, self._host = device, host
        self._timeout = timeout

    # inside graphs and out

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Each dense or sparse tensor summed; the dense ones of a dtype travel together."""
        results: dict[int, Any] = {}
        with tf.device(self._device):
            dense = [i for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)]
            for dtype in dict.fromkeys(tensors[i].dtype for i in dense):
                places = [i for i in dense if tensors[i].dtype == dtype]
                results.update(zip(places, self._sum_group([tensors[i] for i in places])))
            for i in range(len(tensors)):
                if i not in results:
                    results[i] = self._sum_sparse(tensors[i])
        return [results[i] for i in range(len(tensors))]

    def _sum_group(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        flat = [tf.reshape(t, [-1]) for t in tensors]
        whole = self._reduced(flat[0] if len(flat) == 1 else tf.concat(flat, 0), "sum")
        pieces = [whole] if len(flat) == 1 else tf.split(whole, [_num_elements(t) for t in flat])
        return [_shaped(piece, tensor) for piece, tensor in zip(pieces, tensors)]

    def _sum_sparse(self, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """The rows of all processes."""
        values, indices = self.rows([gradient.values, gradient.indices])
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def rows(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The processes' rows joined in rank order; the tensors have one number of rows, which may differ between processes."""
        return joined_rows(tensors, self.rank, self.size, self.sum)

    def _reduced(self, flat: tf.Tensor, op: str) -> tf.Tensor:
        """A vector reduced over all processes. TensorFlow knows an operation by a key, to which dtype and length belong for good."""
        size = flat.shape.num_elements()
        if size is None:
            return self._of_any_size(flat, op)
        limit = (1 << _SIZE_BITS) - 1
        parts = [self._operation(flat[begin : begin + limit], op, min(limit, size - begin)) for begin in range(0, size, limit)]
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0) if parts else flat

    def _of_any_size(self, flat: tf.Tensor, op: str) -> tf.Tensor:
        """One of few lengths, powers of two, so that a length that is never the same makes no endless list of operations."""
        size = tf.size(flat)
        bits = tf.reduce_sum(tf.cast(size > tf.constant([1 << n for n in range(31)]), tf.int32))
        tf.debugging.assert_less(bits, _SIZE_BITS, f"an exchange of more than 2**{_SIZE_BITS - 1} elements whose number is not fixed")
        whole = tf.bitwise.left_shift(1, bits)
        return self._operation(tf.pad(flat, [[0, whole - size]]), op, whole)[:size]

    def _operation(self, flat: tf.Tensor, op: str, size: Any) -> tf.Tensor:
        merge, number = _MERGES[op]
        family = (number * 8 + _DTYPES.index(flat.dtype)) << _SIZE_BITS
        device, group = (self._host, _HOST_GROUP) if flat.dtype.is_integer else (self._device, _GROUP)
        with tf.device(device):
            return tf.raw_ops.CollectiveReduceV2(
                input=flat, group_size=self.size, group_key=group, instance_key=family + size, ordering_token=[], merge_op=merge,
                final_op="Id", communication_hint="auto", timeout_seconds=self._timeout,
            )  # fmt: skip

    # eagerly, for any dtype

    def all_reduce(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        """Over all processes; small dtypes travel as wider ones, what can't be summed here is gathered and reduced."""
        if tensor.shape.num_elements() == 0:
            return tf.identity(tensor)
        if tensor.dtype.is_complex or tensor.dtype == tf.uint64:
            return self._reduce_here(tensor, op)
        wide = widen(tensor)
        if wide.dtype == tf.uint8:  # bool, where max is any and min is all
            wide = tf.cast(wide, tf.int32)
        flat = self._reduced(tf.reshape(wide, [-1]), "sum" if op == "mean" else op)
        if op == "mean":
            flat = flat / as_dtype(self.size, flat.dtype)
        return tf.cast(tf.reshape(flat, tensor.shape), tensor.dtype)

    def _reduce_here(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        rows = self.all_gather(tensor[None], [1] * self.size)
        functions = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max, "min": tf.reduce_min, "product": tf.reduce_prod}
        if tensor.dtype.is_complex and op in ("max", "min"):
            raise TypeError(f"complex numbers have no order, so no {op}")
        return functions[op](rows, axis=0)

    def all_gather(self, tensor: tf.Tensor, first_dims: Sequence[int]) -> tf.Tensor:
        """The processes' tensors joined along the first axis."""
        shape = (sum(first_dims), *tensor.shape[1:])
        if 0 in shape:
            return tf.zeros(shape, tensor.dtype)
        row = int(numpy.prod(tensor.shape[1:], dtype=numpy.int64)) * tensor.dtype.size
        return self._moved(tensor, sum(first_dims[: self.rank]) * row, sum(first_dims) * row, shape)

    def broadcast(self, tensor: tf.Tensor, root: int) -> tf.Tensor:
        """Process `root`'s tensor."""
        if tensor.shape.num_elements() == 0:
            return tf.identity(tensor)
        sent = tensor if self.rank == root else tensor[:0] if tensor.shape.rank else tf.zeros([0], tensor.dtype)
        return self._moved(sent, 0, tensor.shape.num_elements() * tensor.dtype.size, tuple(tensor.shape))

    def _moved(self, tensor: tf.Tensor, begin: int, length: int, shape: tuple[int, ...]) -> tf.Tensor:
        """The tensor whose bytes are this process's from `begin` on, and the others' elsewhere."""
        whole = numpy.zeros(-(-length // 4) * 4, numpy.uint8)
        mine = as_bytes(tensor).numpy()
        whole[begin : begin + len(mine)] = mine
        with tf.device(self._host):
            words = tf.constant(whole.view(numpy.int32))
        summed = self._reduced(words, "sum").numpy().view(numpy.uint8)[:length]
        return from_bytes(tf.constant(summed), tensor.dtype, shape)


Sum = Callable[[Sequence[Any]], list[Any]]


def joined_rows(tensors: Sequence[tf.Tensor], index: Any, parts: int, add: Sum) -> list[tf.Tensor]:
    """The rows of `parts` places joined, by `add`, which sums lists of tensors over them; this is place `index`."""
    own = tf.shape(tensors[0])[0]
    (counts,) = add([tf.one_hot(index, parts, on_value=own, off_value=0, dtype=tf.int32)])
    begin, total = tf.reduce_sum(counts[:index]), tf.reduce_sum(counts)
    padded = [tf.pad(t, [[begin, total - begin - own], *[[0, 0]] * (t.shape.rank - 1)]) for t in tensors]
    return [_with_rows(whole, tensor) for whole, tensor in zip(add(padded), tensors)]


def _with_rows(whole: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    if not tf.executing_eagerly():
        whole.set_shape([None, *like.shape[1:]])
    return whole


def differentiable_reduce(tensor: tf.Tensor, op: str, parts: int, add: Sum) -> tf.Tensor:
    """The sum or mean over `parts` places; each one's gradient is the sum of what all ask of the result."""
    factor = 1.0 / parts if op == "mean" else 1.0

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(x: tf.Tensor) -> Any:
        def gradient(asked: tf.Tensor) -> tf.Tensor:
            return add([asked])[0] * as_dtype(factor, asked.dtype)

        return add([x])[0] * as_dtype(factor, x.dtype), gradient

    return reduce(tensor)


def differentiable_gather(tensor: tf.Tensor, index: Any, parts: int, add: Sum) -> tf.Tensor:
    """The places' rows joined; each one's rows get what all ask of them."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(x: tf.Tensor) -> Any:
        own = tf.shape(x)[0]
        (counts,) = add([tf.one_hot(index, parts, on_value=own, off_value=0, dtype=tf.int32)])

        def gradient(asked: tf.Tensor) -> tf.Tensor:
            begin = tf.reduce_sum(counts[:index])
            return add([asked])[0][begin : begin + own]

        return joined_rows([x], index, parts, add)[0], gradient

    return gather(tensor)


def _num_elements(flat: tf.Tensor) -> Any:
    known = flat.shape.num_elements()
    return tf.size(flat) if known is None else known


def _shaped(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    shaped = tf.reshape(flat, tf.shape(like))
    if not tf.executing_eagerly():
        shaped.set_shape(like.shape)
    return shaped
