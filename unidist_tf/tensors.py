"""Numbers, NumPy arrays, tensors and variables to tensors and back, exactly; bytes for dtypes that a transport lacks."""

from __future__ import annotations

from typing import Any

import numpy
import tensorflow as tf

from unidist.errors import UnsupportedError
from unidist.nest import leaves

# A Python float is float64: tf.convert_to_tensor would make float32 of it.
NUMBER_DTYPES = {bool: tf.bool, int: tf.int64, float: tf.float64, complex: tf.complex128}
_NO_NUMBERS = (tf.string, tf.resource, tf.variant)
_SMALL = (tf.int8, tf.int16, tf.uint8, tf.uint16, tf.uint32, tf.uint64)


def as_tensor(leaf: Any) -> tf.Tensor:
    """A tensor of a number, NumPy array or scalar, tensor or variable (also Keras'); the same dtype, no gradient flows through it.

    Raises UnsupportedError inside a traced function, TypeError for anything else, strings among them.
    """
    tensor = _converted(leaf)
    if tf.is_symbolic_tensor(tensor):
        raise UnsupportedError(
            "collectives are called from Python, not inside a traced function; there, use grad=True, or unidist.reduce_gradients"
        )
    return tf.stop_gradient(tensor)


def _converted(leaf: Any) -> tf.Tensor:
    if type(leaf) in NUMBER_DTYPES:
        if type(leaf) is int and not -(2**63) <= leaf < 2**63:
            raise OverflowError(f"a Python int travels as int64, which does not hold {leaf}: use a float, or broadcast_object")
        return tf.constant(leaf, NUMBER_DTYPES[type(leaf)])
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return _of_array(leaf)
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(tf.sparse.reorder(leaf))
    value = getattr(leaf, "value", None)
    if isinstance(value, (tf.Tensor, tf.Variable)):  # a Keras variable
        return tf.convert_to_tensor(value)
    if isinstance(leaf, tf.IndexedSlices) or (isinstance(leaf, (tf.Tensor, tf.Variable)) and leaf.dtype not in _NO_NUMBERS):
        return tf.convert_to_tensor(leaf)
    what = f"tensors of {leaf.dtype.name}" if isinstance(leaf, (tf.Tensor, tf.Variable)) else type(leaf).__name__
    hint = "; receivers that have no value yet use broadcast_object" if leaf is None else ""
    raise TypeError(f"a collective takes numbers, NumPy arrays, TensorFlow tensors and nests of them, not {what}{hint}")


def _of_array(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, numpy.ma.MaskedArray):
        raise TypeError("a collective would lose the mask of a masked array: give it .filled(value), or the data and the mask")
    if leaf.dtype.kind in "OSUMm" or leaf.dtype.names:
        raise TypeError(f"TensorFlow has no numeric dtype for NumPy's {leaf.dtype}, so a collective can't take it")
    try:
        return tf.constant(numpy.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C", copy=True))
    except (TypeError, ValueError) as error:
        raise TypeError(f"TensorFlow has no numeric dtype for NumPy's {leaf.dtype}, so a collective can't take it") from error


def as_leaf(tensor: tf.Tensor, like: Any) -> Any:
    """The value as the type and on the device of `like`, with memory of its own; rows of `tf.IndexedSlices` as a dense tensor."""
    if type(like) in NUMBER_DTYPES:
        return type(like)(tensor.numpy())
    if isinstance(like, numpy.generic):
        return tensor.numpy()[()] if tensor.shape.rank else tensor.numpy()
    if isinstance(like, numpy.ndarray):
        return numpy.array(tensor.numpy(), dtype=like.dtype, copy=True)
    if isinstance(like, tf.SparseTensor):
        return tf.sparse.from_dense(tensor)
    with tf.device(getattr(like, "device", None)):
        return tf.identity(tensor)


def as_array(tensor: Any) -> Any:
    """A NumPy array with its own memory."""
    return numpy.array(tensor.numpy() if hasattr(tensor, "numpy") else tensor, copy=True)


def as_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor's memory as a flat uint8 tensor."""
    return tf.constant(numpy.frombuffer(numpy.ascontiguousarray(tensor.numpy()).tobytes(), numpy.uint8))


def from_bytes(data: tf.Tensor, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    """The tensor whose memory `as_bytes` gave."""
    array = numpy.frombuffer(data.numpy().tobytes(), dtype.as_numpy_dtype)
    return tf.constant(array.reshape(shape), dtype)


def widen(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor for arithmetic that is exact enough to come back: small integers as int64, bool as uint8, small floats as float32."""
    if tensor.dtype in _SMALL:
        return tf.cast(tensor, tf.int64)
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    if tensor.dtype.is_floating and tensor.dtype.size < 4:
        return tf.cast(tensor, tf.float32)
    return tensor


def as_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """A number or tensor in a dtype; tf.cast would pass a Python float through float32."""
    return tf.constant(value, dtype) if isinstance(value, (int, float)) else tf.cast(value, dtype)


def rows_of(total: tf.Tensor, part: Any, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where the `part`-th of so many consecutive pieces of `total` rows begins, and its size, as `unidist.batch.split_sizes` cuts."""
    small, extra = total // parts, total % parts
    return part * small + tf.minimum(part, extra), small + tf.cast(part < extra, total.dtype)


def as_batch(leaf: Any) -> Any:
    """An array of a batch as a tensor of the same dtype; None and tensors as they are."""
    if leaf is None or isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)


def num_rows(batch: Any) -> int:
    """Rows of a batch: the first dimension of its first array; 1 where there is none."""
    first = next((leaf for leaf in leaves(batch) if getattr(leaf, "shape", None) is not None and len(leaf.shape)), None)
    return int(first.shape[0]) if first is not None else 1
