"""One process, one device: the reference that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unidist_torch.base import TorchBackend
from unidist_torch.hooks import Engine


class Local(TorchBackend):
    """Nothing is exchanged."""

    name = "local"

    def _make_engine(self, model: torch.nn.Module, *, find_unused: bool, options: Mapping[str, Any]) -> Engine | None:
        if options:
            raise TypeError(f"wrap_model got options that torch/local does not know: {sorted(options)}")
        return LocalEngine(self.shares, model)

    def _sync_batchnorm(self, model: torch.nn.Module) -> None:
        """One device's BatchNorm is synchronised as it is."""

    def _hardware(self) -> str:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count > 1:
            return f"uses 1 of {count} GPUs; all: unidist run -n {count} SCRIPT"
        return super()._hardware()


class LocalEngine(Engine):
    """Only scales: a window's batches count by their sizes."""

    def _build(self) -> None:
        pass

    def _forward(self, arguments: Any, keywords: Any, exchange: bool) -> Any:
        return None

    def unexchanged(self) -> list[str]:
        return []
