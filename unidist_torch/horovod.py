"""Horovod's operations under torch models: each gradient leaves as soon as backward has it, all are back when it returns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from unidist.batch import ShareLog
from unidist.errors import UnsupportedError
from unidist.groups import Group
from unidist.launchers import horovod_start
from unidist.world import World
from unidist_torch.base import TorchBackend
from unidist_torch.hooks import Engine
from unidist_torch.transport import Alone, Transport

horovod_start.require("torch", "mpi_lib_v2")

import horovod.torch as hvd  # noqa: E402  its own error would not say how to install it

_OPS = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min, "product": hvd.Product}
_WIDER = {torch.bfloat16: torch.float32, torch.uint8: torch.int32}  # what Horovod does not reduce as it is
_INT32 = 2**31 - 1  # what Horovod counts the pieces of an alltoall with
_COMPRESSION = {None: hvd.Compression.none, "fp16": hvd.Compression.fp16}


class Horovod(TorchBackend):
    """One process per device; started by any launcher."""

    name = "horovod"
    abilities: ClassVar[frozenset[str]] = frozenset({"backward", "groups", "processes"})

    @classmethod
    def _adopted(cls) -> World | None:
        return horovod_start.adopted_world(hvd, os.environ)

    @classmethod
    def _meet(cls, address: str | None) -> str:
        return str(hvd.broadcast_object(address or "", root_rank=0))

    def _start(self) -> None:
        super()._start()
        self._service: horovod_start.Handle | None = None
        self._compression = hvd.Compression.none
        if not hvd.is_initialized():
            self._service = horovod_start.start(self.world, self.control, self.settings.timeout, os.environ)
            with self.control.waiting("Horovod's start"):
                hvd.init()
        self.transport = HorovodTransport()

    def _new_group(self, group: Group) -> Any:
        if 1 < group.size < self.world.size:
            self._service = horovod_start.allow_groups(hvd, self._service, self.world, self.control, self.settings.timeout)
        return super()._new_group(group)

    def _stop(self) -> None:
        super()._stop()
        if self._service is None and not self.control.failures():
            self.transport.remove_groups()
        if self._service is not None:
            hvd.shutdown()
            self._service.stop()

    def _hardware(self) -> str:
        return f"{super()._hardware()}, horovod {'nccl' if hvd.nccl_built() else 'gloo'}"

    def _make_engine(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> Engine | None:
        if options:
            raise TypeError(f"wrap_model got options that torch/horovod does not know: {sorted(options)}")
        return HorovodEngine(self.shares, model, self)

    def _wrap_optimizer(self, optimizer: Any, model: Any, *, compression: Any, options: Mapping[str, Any]) -> Any:
        if compression not in _COMPRESSION:
            raise UnsupportedError(f"compression is None or 'fp16' on Horovod, not {compression!r}")
        self._compression = _COMPRESSION[compression]
        return super()._wrap_optimizer(optimizer, model, compression=None, options=options)

    def _sync_batchnorm(self, model: torch.nn.Module) -> None:
        from unidist_torch.batchnorm import synchronise

        synchronise(model, self)


class HorovodTransport(Transport):
    """Over Horovod, which meets operations by name; between all ranks, or those of a process set."""

    def __init__(self, process_set: hvd.ProcessSet = hvd.global_process_set, prefix: str = "unidist") -> None:
        self.size = process_set.size()
        self._set = process_set
        self._prefix = prefix
        self._number = 0
        self._sets: dict[tuple[int, ...], hvd.ProcessSet] = {}

    def _name(self) -> str:
        self._number += 1
        return f"{self._prefix}.{self._number}"

    def subgroup(self, ranks: Sequence[int], name: str) -> Transport:
        key = tuple(ranks)
        if len(key) in (1, hvd.size()):
            return HorovodTransport(prefix=f"unidist.{name}") if len(key) > 1 else Alone()
        if key not in self._sets:  # Horovod has each set once
            self._sets[key] = hvd.add_process_set(list(key))
        return HorovodTransport(self._sets[key], f"unidist.{name}") if hvd.rank() in key else Alone()

    def remove_groups(self) -> None:
        """Take the process sets from a Horovod that goes on; every rank calls it."""
        for process_set in self._sets.values():
            hvd.remove_process_set(process_set)
        self._sets.clear()

    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        wider = _WIDER.get(tensor.dtype)
        if wider is not None:
            return self.sum_(tensor.to(wider), op).to(tensor.dtype)
        flat = hvd.allreduce(tensor.reshape(-1), op=_OPS[op], name=self._name(), process_set=self._set)
        return flat.reshape(tensor.shape)  # type: ignore[no-any-return]

    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return hvd.allgather(data, name=self._name(), process_set=self._set) if sum(sizes) else data  # type: ignore[no-any-return]

    def exchange_bytes(self, data: torch.Tensor, table: Sequence[Sequence[int]], place: int) -> torch.Tensor:
        largest = max(map(max, table))
        if largest > _INT32:
            return super().exchange_bytes(data, table, place)
        splits = torch.tensor(table[place], dtype=torch.int32)
        return hvd.alltoall(data, splits, name=self._name(), process_set=self._set)[0] if largest else data[:0]  # type: ignore[no-any-return]

    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        return hvd.broadcast(data, root, name=self._name(), process_set=self._set) if data.numel() else data  # type: ignore[no-any-return]


class HorovodEngine(Engine):
    """Own hooks in place of Horovod's optimizer, which asserts against a skipped step or two passes before one.

    A flag per parameter tells the ranks which were used anywhere: one used nowhere keeps what it had.
    """

    _count = 0

    def __init__(self, shares: ShareLog, model: torch.nn.Module, backend: Horovod) -> None:
        HorovodEngine._count += 1
        self._prefix = f"unidist.model{HorovodEngine._count}"
        self._backend = backend
        self._hooks: list[Any] = []
        self._pending: dict[int, Any] = {}
        self._exchange = False
        super().__init__(shares, model)

    def _build(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._held = [p for p in self.parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready(i)) for i, p in enumerate(self._held)]

    def _forward(self, arguments: Any, keywords: Any, exchange: bool) -> Any:
        self._exchange = exchange
        return None

    def _ready(self, index: int) -> Any:
        def ready(parameter: torch.Tensor) -> None:
            if self._exchange and self._backend.world.size > 1:
                if not self._pending:
                    torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]
                self._pending[index] = self._send(index, parameter.grad)

        return ready

    def _send(self, index: int, gradient: Any) -> Any:
        name = f"{self._prefix}.{index}"
        if gradient.is_sparse:
            return hvd.sparse_allreduce_async(gradient, name=name, op=hvd.Average)
        small, context = self._backend._compression.compress(gradient.contiguous())
        return hvd.allreduce_async(small, name=name, op=hvd.Average), context

    def _finish(self) -> None:
        """At the end of backward: the parameters not used here take part with zeros, then all results are taken."""
        used = torch.zeros(len(self._held))
        used[list(self._pending)] = 1.0
        flags = hvd.allreduce_async(used, name=f"{self._prefix}.used", op=hvd.Sum)
        for index, parameter in enumerate(self._held):
            if index not in self._pending:
                kept = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                self._pending[index] = self._send(index, kept)
        try:
            with self._backend.control.waiting("backward"):
                anywhere = hvd.synchronize(flags).tolist()
                results = {index: self._receive(handle) for index, handle in self._pending.items()}
        except RuntimeError as error:
            explained = self._backend.explained("backward", error)
            raise explained from (error if explained is not error else None)
        finally:
            self._pending = {}
        for index, parameter in enumerate(self._held):
            if anywhere[index]:
                if parameter.grad is None:
                    parameter.grad = results[index]
                elif results[index].is_sparse:
                    parameter.grad = results[index]
                else:
                    parameter.grad.copy_(results[index])

    def _receive(self, handle: Any) -> torch.Tensor:
        if callable(handle):
            return handle()  # type: ignore[no-any-return]
        return self._backend._compression.decompress(hvd.synchronize(handle[0]), handle[1])  # type: ignore[no-any-return]

    def unexchanged(self) -> list[str]:
        return []

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
