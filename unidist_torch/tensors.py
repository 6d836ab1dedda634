"""Numbers, NumPy arrays and tensors to tensors and back, exactly; bytes for dtypes that a transport lacks."""

from __future__ import annotations

from typing import Any

import numpy
import torch

NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
WIDER = {
    torch.int8: torch.int64, torch.int16: torch.int64, torch.uint16: torch.int64, torch.uint32: torch.int64,
    torch.bool: torch.uint8, torch.complex32: torch.complex64,
}  # fmt: skip
_TOP_BIT = -(2**63)  # flipped, unsigned numbers read as signed ones keep their order
_WORDS = {1: numpy.uint8, 2: numpy.uint16}


def as_tensor(leaf: Any) -> torch.Tensor:
    """A detached, contiguous, plain tensor of a number, NumPy array or scalar, tensor, or Keras variable; the same dtype.

    Raises TypeError for what is none of them, OverflowError for an int that int64 does not hold.
    """
    if type(leaf) in NUMBER_DTYPES:
        return _of_number(leaf)
    if isinstance(leaf, torch.Tensor):
        return _of_tensor(leaf)
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return _of_array(leaf)
    if isinstance(getattr(leaf, "value", None), torch.Tensor):
        return _of_tensor(leaf.value)
    hint = "; receivers that have no value yet use broadcast_object" if leaf is None else ""
    raise TypeError(f"a collective takes numbers, NumPy arrays, torch tensors and nests of them, not {type(leaf).__name__}{hint}")


def _of_number(leaf: Any) -> torch.Tensor:
    if type(leaf) is int and not -(2**63) <= leaf < 2**63:
        raise OverflowError(f"a Python int travels as int64, which does not hold {leaf}: use a float, or broadcast_object")
    return torch.tensor(leaf, dtype=NUMBER_DTYPES[type(leaf)])


def _of_tensor(leaf: torch.Tensor) -> torch.Tensor:
    if hasattr(leaf, "__tensor_flatten__") or leaf.is_quantized:
        raise TypeError(
            f"a collective takes tensors that hold all their values themselves, not a {type(leaf).__name__}: give it full_tensor(), "
            "to_local() or dequantize()"
        )
    dense = leaf.detach() if leaf.layout is torch.strided else leaf.detach().to_dense()
    return dense.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()


def _of_array(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, numpy.ma.MaskedArray):
        raise TypeError("a collective would lose the mask of a masked array: give it .filled(value), or the data and the mask")
    array = numpy.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C", copy=True)
    known = getattr(torch, array.dtype.name, None)
    if array.dtype.kind not in "biufc" and isinstance(known, torch.dtype):  # bfloat16, float8 of ml_dtypes
        return torch.from_numpy(array.view(_WORDS[array.dtype.itemsize])).view(known)
    if not isinstance(known, torch.dtype):
        raise TypeError(f"torch has no dtype for NumPy's {array.dtype}, so a collective can't take it")
    return torch.from_numpy(array)


def as_leaf(tensor: torch.Tensor, like: Any) -> Any:
    """The value as the type and on the device of `like`; its own memory unless `tensor` came from a collective."""
    if type(like) in NUMBER_DTYPES:
        return type(like)(tensor.item())
    if isinstance(like, (numpy.ndarray, numpy.generic)):
        array = as_array_of(tensor, like.dtype)
        return array[()] if isinstance(like, numpy.generic) else array
    if isinstance(like, torch.Tensor):
        moved = tensor.to(like.device)
        if like.layout is not torch.strided:
            return _sparse(moved, like)
        return moved.clone() if moved.data_ptr() == like.data_ptr() and moved.numel() else moved
    return tensor


def _sparse(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    blocks = {"blocksize": tuple(like.values().shape[1:3])} if like.layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return tensor.to_sparse(layout=like.layout, **blocks)


def as_array_of(tensor: torch.Tensor, dtype: Any) -> Any:
    """A NumPy array of this dtype, which may be one of ml_dtypes or in another byte order."""
    tensor = tensor.detach().cpu()
    if dtype.kind not in "biufc":
        return tensor.view(getattr(torch, numpy.dtype(_WORDS[dtype.itemsize]).name)).numpy().copy().view(dtype)
    return numpy.array(tensor.numpy(), dtype=dtype, copy=True)


def as_array(tensor: torch.Tensor) -> Any:
    """A NumPy array with its own memory; bfloat16, which NumPy lacks, as float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return numpy.array(tensor.numpy(), copy=True)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single value out of others counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose memory `as_bytes` gave; its own copy, so that it is aligned."""
    return data.clone().view(dtype).reshape(shape) if data.numel() else torch.empty(shape, dtype=dtype, device=data.device)


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype's name without the framework: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def widen(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """A tensor for arithmetic that every transport has: small integers as int64, bool as uint8, half and 8-bit floats as float32.

    uint64 is read as int64, which adds and multiplies to the same bits; for "max" and "min" with its top bit flipped.
    """
    if tensor.dtype is torch.uint64:
        signed = tensor.view(torch.int64)
        return signed ^ _TOP_BIT if op in ("max", "min") else signed
    if tensor.dtype in WIDER:
        return tensor.to(WIDER[tensor.dtype])
    return tensor.float() if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4 else tensor


def narrow(tensor: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Back from `widen`."""
    if dtype is torch.uint64:
        return (tensor ^ _TOP_BIT if op in ("max", "min") else tensor).view(dtype)
    return tensor.to(dtype)


def reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    """(n, ...) reduced over its first axis, by the rules of `all_reduce`."""
    wide = widen(rows, op)
    if op in ("max", "min"):
        reduced = wide.amax(0) if op == "max" else wide.amin(0)
    else:
        reduced = wide.prod(0, dtype=wide.dtype) if op == "product" else wide.sum(0, dtype=wide.dtype)
    return narrow(reduced / len(rows) if op == "mean" else reduced, rows.dtype, op)
