"""How tensors travel between the processes of a torch job: over a process group, or not at all."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from unidist.errors import UnsupportedError
from unidist_torch import tensors


class Transport(ABC):
    """Exchanges contiguous tensors on which all ranks agree; three bare operations, the rest is made of them.

    size: how many processes. `place`, where it is asked for, is this process's place among them, in the order of results.
    """

    size: int = 1

    @abstractmethod
    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce in place with "sum", "max", "min" or "product", for dtypes that `tensors.widen` gives."""

    @abstractmethod
    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' flat uint8 tensors, of these sizes, joined."""

    @abstractmethod
    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        """Rank `root`'s flat uint8 tensor in place of the others'; `root` is a rank of the job."""

    def exchange_bytes(self, data: torch.Tensor, table: Sequence[Sequence[int]], place: int) -> torch.Tensor:
        """What all ranks send to this one, joined; `data` is flat uint8, and `table[a][b]` bytes go from the a-th to the b-th."""
        joined = self.gather_bytes(data, [sum(row) for row in table])
        begins = [sum(map(sum, table[:a])) + sum(row[:place]) for a, row in enumerate(table)]
        return torch.cat([joined[begin : begin + row[place]] for begin, row in zip(begins, table)])

    def subgroup(self, ranks: Sequence[int], name: str) -> Transport:
        """The transport between these ranks of the job, which all ranks ask for in one order; `name` is the same on all of them."""
        raise UnsupportedError("this backend has no groups of ranks: leave group out, so that all ranks take part")

    def close(self) -> None:  # noqa: B027  # most transports hold nothing
        """End what `subgroup` made for this one; every rank calls it."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """A new tensor of the same dtype; "mean" is the sum divided by the number of ranks."""
        if tensor.is_complex():
            return self._reduce_complex(tensor, op)
        wide = tensors.widen(tensor, op)
        total = self.sum_(wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide, "sum" if op == "mean" else op)
        return tensors.narrow(total / self.size if op == "mean" else total, tensor.dtype, op)

    def _reduce_complex(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        if op == "product":
            rows = self.all_gather(tensor[None], [1] * self.size)
            return tensors.reduce_rows(rows, op)
        return torch.view_as_complex(self.all_reduce(torch.view_as_real(tensor), op))

    def reduce_scatter(self, tensor: torch.Tensor, op: str, sizes: Sequence[int], place: int) -> torch.Tensor:
        """This rank's rows of what `all_reduce` gives, of `sizes` by rank: everyone's rows for this rank arrive and are reduced here."""
        rows = self.all_to_all(tensor, [sizes] * self.size, place)
        return tensors.reduce_rows(rows.reshape(self.size, sizes[place], *tensor.shape[1:]), op)

    def all_gather(self, tensor: torch.Tensor, first_dims: Sequence[int]) -> torch.Tensor:
        """Joined along the first axis."""
        row = _row_bytes(tensor)
        joined = self.gather_bytes(tensors.as_bytes(tensor), [n * row for n in first_dims])
        return tensors.from_bytes(joined, tensor.dtype, (sum(first_dims), *tensor.shape[1:]))

    def all_to_all(self, tensor: torch.Tensor, table: Sequence[Sequence[int]], place: int) -> torch.Tensor:
        """The rows for this rank, in rank order; `table[a][b]` rows go from the a-th rank to the b-th."""
        row = _row_bytes(tensor)
        moved = self.exchange_bytes(tensors.as_bytes(tensor), [[row * n for n in sizes] for sizes in table], place)
        return tensors.from_bytes(moved, tensor.dtype, (sum(sizes[place] for sizes in table), *tensor.shape[1:]))

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
    """Over a process group, the default one unless told; with NCCL through `device`."""

    def __init__(self, device: torch.device, timeout: float, group: dist.ProcessGroup | None = None) -> None:
        self.size = dist.get_world_size(group)
        self._group = group
        self._given = device, timeout
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def subgroup(self, ranks: Sequence[int], name: str) -> Transport:
        group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=self._given[1]))
        return GroupTransport(*self._given, group) if dist.get_rank() in ranks else Alone()

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        moved = tensor.to(self._device)
        dist.all_reduce(moved, _OPS[op], group=self._group)
        return moved

    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in sizes]
        if longest:
            dist.all_gather(rows, padded, group=self._group)
        return torch.cat([row[:size] for row, size in zip(rows, sizes)])

    def exchange_bytes(self, data: torch.Tensor, table: Sequence[Sequence[int]], place: int) -> torch.Tensor:
        receives = [row[place] for row in table]
        moved = torch.empty(sum(receives), dtype=torch.uint8, device=self._device)
        if any(map(any, table)):
            dist.all_to_all_single(moved, data.to(self._device), receives, list(table[place]), group=self._group)
        return moved

    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        moved = data.to(self._device)
        if moved.numel():
            dist.broadcast(moved, root, group=self._group)
        return moved
