"""Losses with weights in own loops: a window's totals over the sum of its weights, which is known at the window's end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unidist.batch import Drawn
from unidist.errors import UnsupportedError

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend


class WeightedWindow:
    """The weights of the batches of the window that runs; without `accumulate` each batch is a window."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self._weights: list[torch.Tensor] = []
        self._last: Drawn | None = None

    @property
    def held(self) -> bool:
        """Whether batches of this window wait for its end."""
        return bool(self._weights)

    def factor(self, drawn: Drawn, weight: Any, empty: bool, loss: torch.Tensor) -> Any:
        """What the total of this batch is multiplied by; at the window's end what it has summed is brought to the same measure.

        Every rank calls it for each batch; the last of a window is an exchange. Raises UnsupportedError for a second loss over one batch
        of a window, and when batches before it had no weights.
        """
        if drawn.begins:
            self._weights = []
        elif not self._weights or drawn is self._last:
            raise UnsupportedError("each batch of a window takes one backward with a weight, or none of them does")
        self._last = drawn
        own = torch.as_tensor(weight, dtype=torch.promote_types(loss.dtype, torch.float32), device=loss.device).detach()
        self._weights.append(torch.zeros_like(own) if empty else own)
        if not drawn.exchange:
            return 1.0
        factor = self._backend.weight_scale(torch.stack(self._weights).sum())
        if len(self._weights) > 1:
            engines = [engine for engine in self._backend.engines.all() if engine.forwards]
            gradients = [p.grad for engine in engines for p in engine.parameters if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        self._weights = []
        return factor.to(loss.dtype)
