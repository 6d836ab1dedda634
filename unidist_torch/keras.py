"""Keras 3 on torch: its optimizers exchange in `apply`, in one collective; its fit runs over the shares of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unidist.errors import MismatchError, UnsupportedError
from unidist.nest import leaves
from unidist_keras.fit import divide
from unidist_keras.names import check_built, model_variables, numbered
from unidist_torch.transport import Transport

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend

__all__ = ["adapt_model", "adapt_optimizer", "average", "check_built", "model_variables", "numbered", "same_hyperparameters"]


def adapt_model(model: Any, backend: TorchBackend) -> None:
    """`fit` and its relatives over the job's processes, and a train step that tells `apply` how many rows it saw."""
    divide(model, backend)
    model.train_step = functools.partial(_train_step, backend, model, model.train_step)


def _train_step(backend: TorchBackend, model: Any, original: Callable[[Any], Any], data: Any) -> Any:
    _check_compiled(model)
    rows = float(len(leaves(data)[0]))
    backend.shares.parameter_scale = rows  # what synchronised BatchNorm passes back counts as the gradients do
    with backend.fit.step(rows):
        return original(data)


def _check_compiled(model: Any) -> None:
    """Raise UnsupportedError when fit is about to train with an optimizer that exchanges nothing."""
    optimizer = model.optimizer
    if optimizer is not None and not _is_wrapped(optimizer):
        raise UnsupportedError(
            f"the model was compiled with a {type(optimizer).__name__} that did not go through wrap_optimizer, so the ranks' gradients "
            "would not be averaged; call model.compile(unidist.wrap_optimizer(optimizer, model), ...)"
        )


def _is_wrapped(optimizer: Any) -> bool:
    return getattr(vars(optimizer).get("apply"), "func", None) is _apply


def adapt_optimizer(optimizer: Any, model: Any, backend: TorchBackend) -> None:
    """Put an `apply` on the optimizer that exchanges first; builds it for the model's variables.

    Raises MismatchError when it was built for other variables.
    """
    if model is not None:
        variables = model.trainable_variables
        if not optimizer.built:
            optimizer.build(variables)
        held = optimizer._trainable_variables
        if {id(v) for v in held} != {id(v) for v in variables}:
            raise MismatchError(f"the optimizer was built for {len(held)} variables that are not the model's {len(variables)}")
    if backend.world.size > 1:
        optimizer.apply = functools.partial(_apply, backend, optimizer)


def _apply(backend: TorchBackend, optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
    backend.check_keras(optimizer, optimizer._trainable_variables if trainable_variables is None else trainable_variables)
    weight = backend.fit.weight
    scale = None if weight is not None or backend.fit.stepping else backend.shares.seen().scale
    with torch.no_grad():
        reduced = backend._average(grads, scale=scale, weight=weight)
        return type(optimizer).apply(optimizer, reduced, trainable_variables)


def average(gradients: Sequence[Any], scale: float | None, weight: Any, transport: Transport) -> list[Any]:
    """Reduced gradients through one flat buffer per dtype; a flag for each tells where it was used on any rank.

    With `scale` the local ones are multiplied by it before a plain mean; with `weight` the result is the sum of weighted
    gradients over the sum of weights, which rides along.
    """
    present = [g for g in gradients if g is not None]
    dtype = max((g.dtype for g in present), key=lambda d: d.itemsize)
    shapes = _shapes(gradients)
    factor = 1.0 if scale is None else scale
    if weight is not None:
        factor = float(weight)
    parts = [_flat(g, shape, factor, dtype) for g, shape in zip(gradients, shapes)]
    used = torch.tensor([float(g is not None) for g in gradients] + [float(weight or 1.0)], dtype=dtype, device=present[0].device)
    total = transport.sum_(torch.cat([*parts, used]), "sum")
    flags = total[-len(used) :].tolist()
    divisor = flags[-1]
    return [
        (piece / divisor).reshape(shape).to(g.dtype if g is not None else dtype) if flag else None
        for piece, shape, g, flag in zip(total.split([p.numel() for p in parts] + [len(used)]), shapes, gradients, flags)
    ]


def _shapes(gradients: Sequence[Any]) -> list[Any]:
    missing = [i for i, g in enumerate(gradients) if g is None]
    if missing:
        raise MismatchError(
            f"variables {missing} have no gradient in this step; a variable that is never used has to be made untrainable "
            "(trainable=False), since it can't be told from one that is used on another rank"
        )
    return [g.shape for g in gradients]


def _flat(gradient: Any, shape: Any, factor: float, dtype: torch.dtype) -> torch.Tensor:
    flat = gradient.to_dense().reshape(-1).to(dtype) if gradient.is_sparse else gradient.reshape(-1).to(dtype)
    if factor == 0.0:
        return torch.zeros_like(flat)
    return flat if factor == 1.0 else flat * factor


def same_hyperparameters(optimizer: Any, root: int, objects: Callable[[Any, int], Any]) -> None:
    """Rank `root`'s plain hyper-parameters on the others; variables (iterations, learning rate, slots) travel as tensors."""
    config = objects(optimizer.get_config(), root)
    for name, value in config.items():
        if isinstance(value, (int, float, bool, str, type(None))) and name not in ("name", "learning_rate") and hasattr(optimizer, name):
            setattr(optimizer, name, value)
