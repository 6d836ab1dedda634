"""Collectives through which gradients flow as on one device: the total loss is the mean of the ranks' losses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from unidist.errors import MismatchError

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend


def apply(name: str, tensor: torch.Tensor, backend: TorchBackend, **arguments: Any) -> torch.Tensor:
    """`all_reduce` or `all_gather` of a tensor, after shapes and dtypes were compared."""
    rows = [json.loads(r) for r in backend.control.gather(f"{name}(grad)", json.dumps(backend._signature(tensor)))]
    free = 1 if name == "all_gather" else 0
    if any((row[0][free:], row[1]) != (rows[0][0][free:], rows[0][1]) for row in rows):
        raise MismatchError(f"{name} got values that don't fit together: {rows}")
    if name == "all_gather":
        return _AllGather.apply(tensor, backend, [row[0][0] for row in rows])  # type: ignore[no-any-return, no-untyped-call]
    return _AllReduce.apply(tensor, backend, arguments["op"])  # type: ignore[no-any-return, no-untyped-call]


class _AllReduce(torch.autograd.Function):
    """y = sum or mean of x over ranks; each rank's x gets the sum or mean of what all ranks ask of y."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: TorchBackend, op: str) -> torch.Tensor:
        ctx.backend, ctx.op = backend, op
        return backend._all_reduce(tensor.contiguous(), op) if backend.world.size > 1 else tensor.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        moved = ctx.backend._all_reduce(gradient.contiguous(), ctx.op) if ctx.backend.world.size > 1 else gradient
        return moved, None, None


class _AllGather(torch.autograd.Function):
    """y = the ranks' rows; each rank's rows get the sum of what all ranks ask of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: TorchBackend, first_dims: list[int]) -> torch.Tensor:
        ctx.backend, ctx.first_dims = backend, first_dims
        return backend._all_gather(tensor.contiguous(), first_dims) if backend.world.size > 1 else tensor.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        backend = ctx.backend
        if backend.world.size > 1:
            gradient = backend._all_reduce(gradient.contiguous(), "sum")
        begin = sum(ctx.first_dims[: backend.world.rank])
        return gradient[begin : begin + ctx.first_dims[backend.world.rank]], None, None
