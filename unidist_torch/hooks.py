"""What a wrapped native model carries: forward hooks that tell its engine how the pass counts, and drop out of copies."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from unidist.batch import EVEN, Drawn, ShareLog, check_batchnorm

_BATCHNORM = torch.nn.modules.batchnorm._BatchNorm
# Takes any arguments and returns None; a hook that any Python can unpickle, unidist or not.
_NOTHING = contextlib.nullcontext().__exit__


def _normalises_alone(module: torch.nn.Module) -> bool:
    """Whether it is a BatchNorm layer over the replica's share; synchronised ones have a forward of their own."""
    return isinstance(module, _BATCHNORM) and not isinstance(module, torch.nn.SyncBatchNorm) and "forward" not in module.__dict__


class Hook:
    """A callable that belongs to this process: a copy or a pickle of the model holds one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __deepcopy__(self, memo: Any) -> Any:
        return _NOTHING

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Engine(ABC):
    """Exchanges a model's gradients in its backward passes; one per wrapped model.

    `forwards` counts the passes with gradients since the last check, `passes` all, so that one that went around is noticed.
    """

    def __init__(self, shares: ShareLog, model: torch.nn.Module) -> None:
        self.shares = shares
        self.named = {name: p for name, p in model.named_parameters()}
        self.parameters = list(self.named.values())
        self.forwards = 0
        self.passes = 0
        self.drawn: Drawn = EVEN
        self._scaled: list[Any] = []
        self._trainable = self._requires_grad()
        self._has_batchnorm = any(_normalises_alone(module) for module in model.modules())
        self._handles = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            model.register_forward_hook(Hook(self._after)),
        ]
        self._build()

    # what an engine does

    @abstractmethod
    def _build(self) -> None:
        """Set up for the parameters that require gradients; again when that changes."""

    @abstractmethod
    def _forward(self, arguments: Any, keywords: Any, exchange: bool) -> Any:
        """At the start of a pass with gradients."""

    def _forwarded(self, output: Any) -> Any:
        """At its end; returns the output to use."""
        return output

    @abstractmethod
    def unexchanged(self) -> list[str]:
        """After backward: the parameters because of which the exchange did not complete."""

    def repeated(self) -> bool:
        """Whether a parameter's gradient came more than once in a backward pass that exchanges once."""
        return False

    def native(self) -> Any:
        """The engine's own object."""
        return None

    def close(self) -> None:
        """Leave the model bare again."""
        self.scale_gradients(1.0)
        for handle in self._handles:
            handle.remove()

    # how a pass counts

    def _before(self, module: torch.nn.Module, arguments: Any, keywords: Any) -> Any:
        drawn = self.shares.seen()
        if not torch.is_grad_enabled():
            return None
        self.drawn = drawn
        self.forwards += 1
        self.passes += 1
        self.shares.parameter_scale = drawn.scale
        if self._trainable != self._requires_grad():
            self._trainable = self._requires_grad()
            self._build()
        if self._scaled or drawn.scale != 1.0:
            self.scale_gradients(drawn.scale)
        if self._has_batchnorm and module.training and self.shares.last is not None:
            check_batchnorm(self.shares.last)
        return self._forward(arguments, keywords, drawn.exchange)

    def _after(self, module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        return self._forwarded(output) if torch.is_grad_enabled() else None

    def scale_gradients(self, scale: float) -> None:
        """Multiply what the coming backward passes give each parameter, before it is added up and exchanged."""
        for handle in self._scaled:
            handle.remove()
        multiply = torch.zeros_like if scale == 0.0 else lambda gradient: gradient * scale
        self._scaled = [] if scale == 1.0 else [p.register_hook(multiply) for p in self.parameters if p.requires_grad]

    def _requires_grad(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]
