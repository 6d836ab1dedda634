"""Relay: every rank sends its gradients to the control plane as text, and adds up what all sent."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch

from unidist.control import Control
from unidist_torch import tensors
from unidist_torch.base import TorchBackend
from unidist_torch.hooks import Engine
from unidist_torch.transport import Transport

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


class RelayTransport(Transport):
    """The three operations of which unidist makes its collectives, over `control.gather`, which every rank calls."""

    def __init__(self, control: Control) -> None:
        self.size = control.size
        self._control = control

    def _gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's bytes."""
        text = base64.b85encode(data.cpu().numpy().tobytes()).decode()
        rows = self._control.gather("relay", text) if self.size > 1 else [text]
        arrays = [numpy.frombuffer(base64.b85decode(row), numpy.uint8).copy() for row in rows]
        return [torch.from_numpy(array).to(data.device) for array in arrays]

    def sum_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """In rank order, so that all ranks get the same bits."""
        total, *others = [tensors.from_bytes(row, tensor.dtype, tuple(tensor.shape)) for row in self._gather(tensors.as_bytes(tensor))]
        for other in others:
            total = REDUCE[op](total, other)
        return total

    def gather_bytes(self, data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return torch.cat(self._gather(data))

    def broadcast_(self, data: torch.Tensor, root: int) -> torch.Tensor:
        return self._gather(data)[root]


class RelayEngine(Engine):
    """Exchanges when a backward pass ends: a message for each gradient that some rank computed."""

    def __init__(self, backend: Relay, model: torch.nn.Module) -> None:
        self._transport = backend.transport
        self._hooks: list[Any] = []
        self._exchange = self._ready = False
        super().__init__(backend.shares, model)

    def _build(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._held = [p for p in self.parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._came) for p in self._held]

    def _forward(self, arguments: Any, keywords: Any, exchange: bool) -> None:
        self._exchange = exchange

    def _came(self, parameter: torch.Tensor) -> None:
        """The first gradient of a pass asks for a call at its end."""
        if self._exchange and not self._ready:
            self._ready = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._ready = False
        used = torch.tensor([float(p.grad is not None) for p in self._held])
        anywhere = self._transport.all_reduce(used, "max").tolist()
        for parameter, needed in zip(self._held, anywhere):
            if needed:  # what no rank used keeps what it had
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().contiguous()
                parameter.grad = self._transport.all_reduce(gradient, "mean")

    def unexchanged(self) -> list[str]:
        return []

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()


class Relay(TorchBackend):
    """One process per device; nothing is needed besides the connection that every job has."""

    name = "relay"
    abilities: ClassVar[frozenset[str]] = frozenset({"backward", "processes", "relayed"})
    refuses: ClassVar[Mapping[int, str]] = {6: "no synchronised BatchNorm"}

    def _start(self) -> None:
        super()._start()
        self.transport = RelayTransport(self.control)

    def _hardware(self) -> str:
        return f"{super()._hardware()}, gradients through the control plane"

    def _make_engine(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> Engine:
        if options:
            raise TypeError(f"wrap_model got options that torch/relay does not know: {sorted(options)}")
        return RelayEngine(self, model)
