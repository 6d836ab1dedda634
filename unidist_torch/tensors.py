"""Numbers, NumPy arrays and tensors to tensors and back, exactly; bytes for dtypes that a transport lacks."""

from __future__ import annotations

from typing import Any

import numpy
import torch

NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
WIDER = {
    torch.int8: torch.int64, torch.int16: torch.int64, torch.uint16: torch.int64, torch.uint32: torch.int64,
    torch.uint64: torch.int64, torch.bool: torch.uint8,
}  # fmt: skip


def as_tensor(leaf: Any) -> torch.Tensor:
    """A detached, contiguous tensor of a number, NumPy array or scalar, tensor, or Keras variable; the same dtype."""
    if type(leaf) in NUMBER_DTYPES:
        return torch.tensor(leaf, dtype=NUMBER_DTYPES[type(leaf)])
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to_dense().contiguous() if leaf.is_sparse else leaf.detach().contiguous()
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return torch.from_numpy(numpy.array(leaf, order="C", copy=True))
    if isinstance(getattr(leaf, "value", None), torch.Tensor):
        return leaf.value.detach().contiguous()  # type: ignore[no-any-return]
    raise TypeError(f"a collective takes numbers, NumPy arrays, torch tensors and nests of them, not {type(leaf).__name__}")


def as_leaf(tensor: torch.Tensor, like: Any) -> Any:
    """The value as the type and on the device of `like`; its own memory unless `tensor` came from a collective."""
    if type(like) in NUMBER_DTYPES:
        return type(like)(tensor.item())
    if isinstance(like, numpy.generic):
        return tensor.cpu().numpy()[()]
    if isinstance(like, numpy.ndarray):
        return as_array(tensor)
    if isinstance(like, torch.Tensor):
        moved = tensor.to(like.device)
        return moved.clone() if moved.data_ptr() == like.data_ptr() and moved.numel() else moved
    return tensor


def as_array(tensor: torch.Tensor) -> Any:
    """A NumPy array with its own memory; bfloat16, which NumPy lacks, as float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return numpy.array(tensor.numpy(), copy=True)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose memory `as_bytes` gave; its own copy, so that it is aligned."""
    return data.clone().view(dtype).reshape(shape) if data.numel() else torch.empty(shape, dtype=dtype, device=data.device)


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype's name without the framework: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for arithmetic that every transport has: small integers as int64, bool as uint8, float8 as float32."""
    if tensor.dtype in WIDER:
        return tensor.to(WIDER[tensor.dtype])
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.float()
    return tensor
