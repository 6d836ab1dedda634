"""DistributedDataParallel under the user's own model: its reducer exchanges while backward runs, forward hooks arm it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from unidist.batch import ShareLog
from unidist.world import World
from unidist_torch import group
from unidist_torch.base import TorchBackend
from unidist_torch.hooks import Engine
from unidist_torch.transport import GroupTransport

_OURS = {"module", "device_ids", "output_device", "broadcast_buffers", "forward_sync_buffers", "find_unused_parameters", "init_sync"}


class DDP(TorchBackend):
    """One process per device; gloo between CPUs, NCCL between GPUs."""

    name = "ddp"
    abilities: ClassVar[frozenset[str]] = frozenset({"backward", "groups", "processes"})

    @classmethod
    def _adopted(cls) -> World | None:
        return group.adopted_world()

    @classmethod
    def _meet(cls, address: str | None) -> str:
        return group.meet(address)

    def _start(self) -> None:
        super()._start()
        self._owner = not dist.is_initialized()
        if self._owner:
            with self.control.waiting("the process group's start"):
                group.start_group(self.world, self.control, self._device, self.settings.timeout)
        self.transport = GroupTransport(self._device, self.settings.timeout)

    def _stop(self) -> None:
        super()._stop()
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()

    def _hardware(self) -> str:
        return f"{super()._hardware()}, {dist.get_backend()}"

    def _engine(self) -> Mapping[str, Any]:
        return {"process_group": dist.group.WORLD}

    def _make_engine(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> Engine | None:
        contradicting = _OURS & set(options)
        if contradicting:
            raise TypeError(f"{sorted(contradicting)} are set by unidist; leave them out of wrap_model's options")
        if not any(p.requires_grad for p in model.parameters()):
            return None
        return ReducerEngine(self.shares, model, find_unused, dict(options), self._device, self.explained)

    def _sync_batchnorm(self, model: torch.nn.Module) -> None:
        from unidist_torch.batchnorm import synchronise

        synchronise(model, self)


class _Held(torch.nn.Module):
    """The parameters that DistributedDataParallel looks after, so that the model itself stays the user's."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(str(index), parameter)


class _SparselyHeld(torch.nn.Embedding):
    """A parameter whose gradients are sparse, which DistributedDataParallel tells from the layer that holds it."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__(*weight.shape, sparse=True, _weight=weight.detach())
        self.weight = weight


class ReducerEngine(Engine):
    """DistributedDataParallel, driven by the model's forward hooks in place of a wrapper's forward."""

    def __init__(
        self, shares: ShareLog, model: torch.nn.Module, find_unused: bool, options: dict[str, Any], device: torch.device,
        explained: Callable[[str, RuntimeError], Exception],
    ) -> None:  # fmt: skip
        self._explained = explained
        self._find_unused = find_unused
        self._options = options
        self._device = device
        self._ddp: Any = None
        self._watchers: list[Any] = []
        self._counts: list[int] = []
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
        self._sparse = {f"{name}.weight".lstrip(".") for name, layer in layers if layer.sparse}
        super().__init__(shares, model)

    def _build(self) -> None:
        self._ddp = None  # the old reducer's hooks go before the new one's come
        held = {name: p for name, p in self.named.items() if p.requires_grad}
        if held:
            devices = [self._device] if self._device.type == "cuda" else None
            sparse = [name for name in held if name in self._sparse]
            holder = _Held(p for name, p in held.items() if name not in sparse)
            for index, name in enumerate(sparse):
                holder.add_module(f"sparse{index}", _SparselyHeld(held[name]))
            self._ddp = torch.nn.parallel.DistributedDataParallel(
                holder, device_ids=devices, init_sync=False, find_unused_parameters=self._find_unused, **self._options
            )
            if not self._options.get("static_graph"):
                self._watch(list(held.values()))

    def _watch(self, parameters: list[torch.nn.Parameter]) -> None:
        """Count, until one pass was checked, how often each gradient comes."""
        self._unwatch()
        self._counts = [0] * len(parameters)

        def counter(index: int) -> Any:
            def count(parameter: torch.Tensor) -> None:
                self._counts[index] += 1

            return count

        self._watchers = [p.register_post_accumulate_grad_hook(counter(index)) for index, p in enumerate(parameters)]

    def _unwatch(self) -> None:
        for handle in self._watchers:
            handle.remove()
        self._watchers = []

    def repeated(self) -> bool:
        if not self._watchers or not self.drawn.exchange or not any(self._counts):
            return False
        self._unwatch()
        return max(self._counts) > 1

    def native(self) -> Any:
        return self._ddp

    def _forward(self, arguments: Any, keywords: Any, exchange: bool) -> Any:
        if self._ddp is None:
            return None
        self._ddp.require_backward_grad_sync = exchange
        if self._watchers:
            self._counts = [0] * len(self._counts)
        try:
            return self._ddp._pre_forward(*arguments, **keywords)
        except RuntimeError as error:  # in the second step the ranks agree on buckets here
            explained = self._explained("the forward pass", error)
            raise explained from (error if explained is not error else None)

    def _forwarded(self, output: Any) -> Any:
        return output if self._ddp is None else self._ddp._post_forward(output)

    def unexchanged(self) -> list[str]:
        if self._ddp is None or not self.drawn.exchange:
            return []
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError:
            return [name for name, p in self.named.items() if p.requires_grad and p.grad is None] or ["(unknown)"]
        return []

    def close(self) -> None:
        super().close()
        self._unwatch()
        self._ddp = None
