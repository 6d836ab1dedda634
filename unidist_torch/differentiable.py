"""Collectives through which gradients flow as on one device: the total loss is the mean of the ranks' losses.

Each rank's backward leaves the gradient of its own loss, of which the mean over ranks is the total's; so what a rank gets for
its own value is the sum of what all ranks ask of it. Where plain backward passes of uneven shares scale the parameters'
gradients later (`parameter_scale`), what is asked travels multiplied by the asking rank's scale and arrives divided by one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.batch import split_sizes
from unidist.call import Call, Leaf
from unidist.collectives import piece_sizes
from unidist_torch.tensors import as_tensor

Table = Sequence[Sequence[int]]


def apply(name: str, tensor: torch.Tensor, *, group: Any = None, op: str = "", sizes: Sequence[int] | None = None) -> torch.Tensor:
    """`all_reduce`, `reduce_scatter`, `all_gather` or `all_to_all` of a tensor, after shapes and dtypes were compared."""
    call = Call(f"{name}(grad=True)", group)

    def check(leaf: Leaf) -> None:
        if not leaf.dtype.startswith(("float", "bfloat", "complex")):
            raise TypeError(f"gradients flow through floating-point and complex tensors, not through {leaf.dtype}")
        if name == "reduce_scatter" and not leaf.shape:
            raise TypeError("reduce_scatter cuts the first axis, and a 0-d tensor has none")
        if name == "all_to_all":
            leaf.sizes = piece_sizes(leaf.shape, sizes, call.size)

    joins = name in ("all_gather", "all_to_all")
    _, rows = call.agree(lambda: call.leaves(tensor, check, rows=name == "all_gather"), first_free=joins, always=joins)
    if name == "all_gather":
        value = tensor.reshape(1) if tensor.ndim == 0 else tensor
        return _AllGather.apply(value, call, [row[0][1][0] for row in rows])  # type: ignore[no-any-return, no-untyped-call]
    if name == "all_to_all":
        return _AllToAll.apply(tensor, call, [row[0][3] for row in rows])  # type: ignore[no-any-return, no-untyped-call]
    function = _ReduceScatter if name == "reduce_scatter" else _AllReduce
    return function.apply(tensor, call, op)  # type: ignore[no-any-return, no-untyped-call]


def _all_reduce(call: Call, tensor: torch.Tensor, op: str) -> torch.Tensor:
    return tensor.clone() if call.size == 1 else call.backend._all_reduce(as_tensor(tensor), op, **call.options)  # type: ignore[no-any-return]


def _reduce_scatter(call: Call, tensor: torch.Tensor, op: str, sizes: Sequence[int]) -> torch.Tensor:
    if call.size == 1:
        return tensor.clone()
    return call.backend._reduce_scatter(as_tensor(tensor), op, sizes, **call.options)  # type: ignore[no-any-return]


def _all_gather(call: Call, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return tensor.clone() if call.size == 1 else call.backend._all_gather(as_tensor(tensor), sizes, **call.options)  # type: ignore[no-any-return]


def _all_to_all(call: Call, tensor: torch.Tensor, table: Table) -> torch.Tensor:
    return tensor.clone() if call.size == 1 else call.backend._all_to_all(as_tensor(tensor), table, **call.options)  # type: ignore[no-any-return]


def _sent(call: Call, gradient: torch.Tensor) -> torch.Tensor:
    scale = call.backend.shares.parameter_scale
    return gradient if scale == 1.0 else gradient * scale if scale else torch.zeros_like(gradient)


def _arrived(call: Call, gradient: torch.Tensor) -> torch.Tensor:
    scale = call.backend.shares.parameter_scale
    return gradient if scale == 1.0 else gradient / scale if scale else torch.zeros_like(gradient)


class _AllReduce(torch.autograd.Function):
    """y = sum or mean of x over ranks; each rank's x gets the sum or mean of what all ranks ask of y."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call, op: str) -> torch.Tensor:
        ctx.call, ctx.op = call, op
        return _all_reduce(call, tensor, op)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _arrived(ctx.call, _all_reduce(ctx.call, _sent(ctx.call, gradients[0]), ctx.op)), None, None


class _ReduceScatter(torch.autograd.Function):
    """y = this rank's rows of the sum or mean; each rank's x gets the rows that all ranks ask of their own, joined."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call, op: str) -> torch.Tensor:
        ctx.call, ctx.op, ctx.sizes = call, op, split_sizes(tensor.shape[0], call.size)
        return _reduce_scatter(call, tensor, op, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        joined = _arrived(ctx.call, _all_gather(ctx.call, _sent(ctx.call, gradients[0]), ctx.sizes))
        return joined / ctx.call.size if ctx.op == "mean" else joined, None, None


class _AllGather(torch.autograd.Function):
    """y = the ranks' rows; each rank's rows get the sum of what all ranks ask of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call, sizes: list[int]) -> torch.Tensor:
        ctx.call, ctx.sizes = call, sizes
        return _all_gather(call, tensor, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _arrived(ctx.call, _reduce_scatter(ctx.call, _sent(ctx.call, gradients[0]), "sum", ctx.sizes)), None, None


class _AllToAll(torch.autograd.Function):
    """y = the rows that the ranks have for this one; what is asked of them goes back where they came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Call, table: Table) -> torch.Tensor:
        ctx.call, ctx.table = call, table
        return _all_to_all(call, tensor, table)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = [list(column) for column in zip(*ctx.table)]
        return _arrived(ctx.call, _all_to_all(ctx.call, _sent(ctx.call, gradients[0]), back)), None, None
