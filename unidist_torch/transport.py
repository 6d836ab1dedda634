"""How tensors travel between the processes of a torch job: over a process group, or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from unidist.errors import UnsupportedError
from unidist_torch import tensors


class Transport(ABC):
    """Exchanges contiguous tensors on which all ranks agree; three bare operations, the rest is made of them."""

    size: int = 1

    @abstractmethod
    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce in place with "sum", "max", "min" or "product", for dtypes that `tensors.widen` gives."""

    @abstractmethod
    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' flat uint8 tensors, of these sizes, joined."""

    @abstractmethod
    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        """Rank `root`'s flat uint8 tensor in place of the others'."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """A new tensor of the same dtype; "mean" is the sum divided by the number of ranks."""
        if tensor.is_complex():
            if op not in ("sum", "mean"):
                raise UnsupportedError(f"complex numbers have a sum and a mean, no {op}")
            real = torch.view_as_real(tensor.resolve_conj()).contiguous()
            return torch.view_as_complex(self.all_reduce(real, op))
        wide = tensors.widen(tensor)
        total = self.sum_(wide.clone() if wide is tensor else wide, "sum" if op == "mean" else op)
        return (total / self.size if op == "mean" else total).to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, first_dims: Sequence[int]) -> torch.Tensor:
        """Joined along the first axis."""
        row = tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else _row_bytes(tensor)
        joined = self.gather_bytes(tensors.as_bytes(tensor), [n * row for n in first_dims])
        return tensors.from_bytes(joined, tensor.dtype, (sum(first_dims), *tensor.shape[1:]))

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """A new tensor with rank `root`'s values."""
        moved = self.broadcast_(tensors.as_bytes(tensor).clone(), root)
        return tensors.from_bytes(moved, tensor.dtype, tuple(tensor.shape))


def _row_bytes(tensor: torch.Tensor) -> int:
    size = tensor.element_size()
    for length in tensor.shape[1:]:
        size *= length
    return size


class Alone(Transport):
    """One process: everything is what it was."""

    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return tensor

    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return data

    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        return data


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}


class GroupTransport(Transport):
    """Over the default process group; with NCCL through `device`."""

    def __init__(self, device: torch.device) -> None:
        self.size = dist.get_world_size()
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        moved = tensor.to(self._device)
        dist.all_reduce(moved, _OPS[op])
        return moved

    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in sizes]
        if longest:
            dist.all_gather(rows, padded)
        return torch.cat([row[:size] for row, size in zip(rows, sizes)])

    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        moved = data.to(self._device)
        if moved.numel():
            dist.broadcast(moved, root)
        return moved
