"""DataParallel: one process drives all GPUs of a host; the batch is scattered to copies of the model, outputs are gathered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn.parallel import gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter_kwargs

from unidist_torch.base import TorchBackend
from unidist_torch.hooks import Engine
from unidist_torch.local import LocalEngine


class DataParallel(TorchBackend):
    """The loss is computed over the gathered outputs, so that it is one device's by nature. Without GPUs it is one device."""

    name = "dataparallel"
    abilities: ClassVar[frozenset[str]] = frozenset({"backward"})

    def _start(self) -> None:
        super()._start()
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._devices = list(range(min(visible, self.settings.num_devices or visible)))
        if len(self._devices) > 1:
            self.refuses = {6: "no synchronised BatchNorm"}
        if not self._devices:
            print("unidist: torch/dataparallel finds no GPU on this machine and runs as one device", file=sys.stderr)

    def _hardware(self) -> str:
        return f"{len(self._devices)} x {torch.cuda.get_device_name(0)}" if self._devices else "CPU, one device"

    def _sync_batchnorm(self, model: torch.nn.Module) -> None:
        if len(self._devices) > 1:
            super()._sync_batchnorm(model)

    def _make_engine(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> Engine | None:
        if options:
            raise TypeError(f"wrap_model got options that torch/dataparallel does not know: {sorted(options)}")
        if len(self._devices) > 1:
            model.forward = Scattered(model, self._devices)  # type: ignore[method-assign]
        return LocalEngine(self.shares, model)

    def _stop(self) -> None:
        for model in self.engines.models():
            if isinstance(model.__dict__.get("forward"), Scattered):
                del model.__dict__["forward"]
        super()._stop()


class Scattered:
    """In place of a model's forward: its rows on all devices at once. A copy of the model is bare again."""

    def __init__(self, model: torch.nn.Module, devices: list[int]) -> None:
        self._model = model
        self._devices = devices

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        inputs, options = scatter_kwargs(arguments, keywords, self._devices)
        own = type(self._model).forward
        if len(inputs) <= 1:
            return own(self._model, *inputs[0], **options[0]) if inputs else own(self._model)
        copies = replicate(self._model, self._devices[: len(inputs)], not torch.is_grad_enabled())
        for copy in copies:
            copy.__dict__.pop("forward", None)
            copy._forward_pre_hooks, copy._forward_hooks = type(copy._forward_pre_hooks)(), type(copy._forward_hooks)()
        return gather(parallel_apply(copies, inputs, options, self._devices[: len(inputs)]), self._devices[0])
