"""The engines of a job: which model has one, and whether what an optimizer is about to apply was exchanged by them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unidist.context import raise_everywhere
from unidist.errors import MismatchError, UnsupportedError
from unidist_torch.hooks import Engine


class Engines:
    """Engines by model, and the checks before an update that need all of them."""

    def __init__(self) -> None:
        self._of_model: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()
        self._attached = 0
        # optimizer: (when it was worked out, engines that hold its parameters, their passes at its last step)
        self._holds: weakref.WeakKeyDictionary[Any, tuple[Any, list[Engine], dict[Engine, int]]] = weakref.WeakKeyDictionary()
        self._watched: list[Any] = []

    def attach(self, model: torch.nn.Module, engine: Engine) -> None:
        """From now on this engine exchanges the model's gradients."""
        self._of_model[model] = engine
        self._attached += 1

    def models(self) -> list[torch.nn.Module]:
        """The models that have one."""
        return list(self._of_model)

    def all(self) -> list[Engine]:
        """All of them."""
        return list(self._of_model.values())

    def get(self, model: Any) -> Engine | None:
        """The model's own."""
        return self._of_model.get(model) if isinstance(model, torch.nn.Module) else None

    def of(self, model: Any) -> list[Engine]:
        """Those that a step over this model drives: its own, else those of wrapped modules inside it."""
        own = self.get(model)
        if own is not None:
            return [own]
        inside = set(model.modules()) if isinstance(model, torch.nn.Module) else set()
        return [engine for wrapped, engine in self._of_model.items() if wrapped in inside]

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each of its steps in an own loop, check that everything was exchanged."""
        self._watched.append(optimizer.register_step_pre_hook(self._before_step))

    def close(self) -> None:
        """Leave models and optimizers bare."""
        for engine in self.all():
            engine.close()
        for handle in self._watched:
            handle.remove()
        self._of_model.clear()

    def check(self, engines: Iterable[Engine]) -> None:
        """After backward: raises on this rank and posts to the board when an engine did not exchange.

        Raises MismatchError naming unused parameters or telling of a pass around the forward hooks, UnsupportedError for
        gradients that came several times.
        """
        for engine in engines:
            if engine.forwards == 0 and any(p.grad is not None and p.requires_grad for p in engine.parameters):
                raise_everywhere(MismatchError(
                    "gradients were computed by a forward pass that went around the model's own call (another method than "
                    "model(...)), so they were not exchanged; call the model itself, or wrap the module whose call it is"
                ))  # fmt: skip
            if engine.repeated():
                raise_everywhere(UnsupportedError(
                    "gradients came several times in one backward pass (reentrant activation checkpointing), of which the engine exchanges "
                    "the first: call torch.utils.checkpoint.checkpoint with use_reentrant=False, or pass static_graph=True to wrap_model"
                ))  # fmt: skip
            unused = engine.unexchanged() if engine.forwards else []
            if unused:
                raise_everywhere(MismatchError(
                    f"parameters without a gradient in this step: {', '.join(unused[:5])}{'...' if len(unused) > 5 else ''}; pass "
                    "find_unused_parameters=True to wrap_model when a forward pass does not use all of them"
                ))  # fmt: skip
            engine.forwards = 0

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Before any weight moves in an own loop. (A closure runs its passes later.)"""
        closure = arguments[1] if len(arguments) > 1 else keywords.get("closure")  # the first is the optimizer itself
        self._find(optimizer)
        if closure is None:
            self.check(self._unchecked(optimizer))

    def _find(self, optimizer: Any) -> None:
        """Work out which engines exchange an optimizer's parameters, again when it or the wrapped models changed.

        Raises UnsupportedError when it would train parameters that no engine exchanges.
        """
        key = (len(optimizer.param_groups), self._attached)
        if self._holds.get(optimizer, (None,))[0] == key:
            return
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        known = self._holds.get(optimizer, (None, [], {}))[2]
        mine = [engine for engine in self.all() if any(id(p) in held for p in engine.parameters)]
        check_wrapped(held, (p for engine in mine for p in engine.parameters))
        self._holds[optimizer] = (key, mine, {engine: known.get(engine, 0) for engine in mine})

    def _unchecked(self, optimizer: Any) -> list[Engine]:
        """The engines with parameters of this optimizer, without those whose passes since its last step were checked already."""
        _, mine, passes = self._holds[optimizer]
        unchecked = [engine for engine in mine if engine.forwards or engine.passes == passes[engine]]
        passes.update({engine: engine.passes for engine in mine})
        return unchecked


def check_wrapped(held: Mapping[int, torch.Tensor], exchanged: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError when an optimizer holds trainable parameters (by id) that are in no wrapped model."""
    known = {id(p) for p in exchanged}
    strays = [p for key, p in held.items() if p.requires_grad and key not in known]
    if strays:
        raise UnsupportedError(
            f"the optimizer holds {len(held)} parameters, {len(strays)} of which (the first: shape {tuple(strays[0].shape)}) are in no "
            "wrapped model, so every rank would train its own; call wrap_model on the module that holds them, before the first step"
        )
