"""Half precision in the training step: the forward pass under autocast, and torch's scaler around the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unidist import frameworks
from unidist.agreement import check_same
from unidist.base import StepOptions
from unidist.errors import UnsupportedError

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HALVES = (torch.bfloat16, torch.float16)
Value = tuple[torch.Tensor, "torch.Tensor | None"]


class Autocast:
    """Losses computed under `torch.autocast`; a loss that comes out in half precision is widened, the weights stay as they are."""

    def __init__(self, losses: Callable[[Any], Value], device: torch.device, precision: str) -> None:
        self._losses = losses
        self._device_type = device.type
        self._dtype = _DTYPES[precision]

    def __call__(self, batch: Any) -> Value:
        with torch.autocast(self._device_type, self._dtype):
            value, weight = self._losses(batch)
        return (value.float() if value.dtype in _HALVES else value), weight


def check_precision(model: Any, precision: str | None) -> None:
    """Raise UnsupportedError for Keras models, whose layers choose the dtypes in which they compute when they are built."""
    if precision is not None and frameworks.is_keras(model):
        policy = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}[precision]
        raise UnsupportedError(
            f"precision={precision!r} is for torch modules; a Keras model takes it from its dtype policy: call "
            f"keras.mixed_precision.set_global_policy({policy!r}) before the model is built"
        )


def make_scaler(backend: TorchBackend, options: StepOptions, native: bool) -> Any:
    """The scaler of a step, equal on all ranks to rank 0's; None without one. fp16 gets one by itself.

    Raises TypeError for something else than torch's GradScaler, UnsupportedError with a Keras optimizer, MismatchError when it is
    switched off on some ranks only.
    """
    scaler = options.scaler
    if scaler is None and options.precision == "fp16" and native:
        scaler = torch.amp.GradScaler(backend.device.type)
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a torch.amp.GradScaler, not a {type(scaler).__name__}")
    if not native:
        raise UnsupportedError("a torch GradScaler scales for torch optimizers; with Keras' use keras.optimizers.LossScaleOptimizer")
    check_same(backend.control, "the scaler", [["the scaler", "enabled" if scaler.is_enabled() else "switched off"]])
    if not scaler.is_enabled():
        return None
    backend._same_start(scaler, 0)
    return scaler
