"""What `make_train_step(precision=..., scaler=...)` adds on PyTorch: a forward pass under autocast, and a loss that is scaled."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from unidist import frameworks
from unidist.base import StepOptions
from unidist.errors import UnsupportedError

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How a step computes: `autocast` around model and loss, and the scaler of its losses, if any.

    With "fp16" and no scaler of the user's a GradScaler is made, since small gradients vanish in float16. All ranks begin with rank 0's.
    """

    def __init__(self, backend: TorchBackend, model: Any, optimizer: Any, options: StepOptions) -> None:
        self._device = backend.device.type
        self._dtype = _DTYPES.get(options.precision or "")
        if options.precision is not None and frameworks.is_keras(model):
            raise UnsupportedError(
                f"precision={options.precision!r} is for torch modules; a Keras model computes by its dtype policy: call "
                "keras.config.set_dtype_policy('mixed_bfloat16') or ('mixed_float16') before it is built"
            )
        if options.scaler is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedError(
                "scaler= goes with a torch optimizer; for one of Keras' use keras.optimizers.LossScaleOptimizer around it"
            )
        self.scaler = options.scaler
        if self.scaler is None and options.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self._device)
        if self.scaler is not None and not hasattr(self.scaler, "unscale_"):
            raise TypeError(f"scaler is a torch.amp.GradScaler, not a {type(self.scaler).__name__}")
        if self.scaler is not None:
            backend._same_start(self.scaler, 0)

    @property
    def plain(self) -> bool:
        """Whether nothing is to be done."""
        return self._dtype is None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward pass and the loss."""
        return torch.autocast(self._device, dtype=self._dtype)

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step on scaled gradients that were reduced; whether it took place.

        What is infinite on one rank was made so on all by the reduction, so that all skip, and all have the same scale after it.
        """
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= before)
