"""Keras 3 on torch: its optimizers exchange in `apply`, in one collective; its fit runs over the shares of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch

from unidist.errors import MismatchError, UnsupportedError
from unidist.nest import map_nest
from unidist_keras.counting import SUM, check_keras, counted_losses
from unidist_keras.datasets import first_leaf
from unidist_keras.fit import divide, take
from unidist_keras.functions import check_functions
from unidist_keras.names import check_built, model_variables, numbered
from unidist_keras.on_instance import is_put, of_class, put, remove
from unidist_keras.randomness import separate
from unidist_torch.transport import Transport

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend

__all__ = [
    "adapt_model", "adapt_optimizer", "average", "check_built", "counted", "model_variables", "numbered", "same_hyperparameters", "take",
]  # fmt: skip


def adapt_model(model: Any, backend: TorchBackend) -> None:
    """`fit` and its relatives over the job's processes, and a train step that tells `apply` how many rows it saw."""
    check_keras()
    divide(model, backend)
    _without_keras_own(model)
    separate(model, lambda: backend.world.rank)
    for name, step in (("train_step", _train_step), ("test_step", _test_step)):
        put(model, name, functools.partial(step, backend, model, of_class(model, name)))
    check_functions(model, backend, no_jit="the exchange of gradients is not one of the operations that torch.compile compiles")


def _without_keras_own(model: Any) -> None:
    """From 3.16 on Keras puts DistributedDataParallel around a model and sums metrics by itself where a process group exists."""
    trainer = next((cls for cls in type(model).__mro__ if "_initialize_ddp" in vars(cls)), None)
    if trainer is None:
        return
    put(model, "_initialize_ddp", lambda: None)
    if type(model).get_metrics_result is vars(trainer).get("get_metrics_result"):
        put(model, "get_metrics_result", lambda: super(trainer, model).get_metrics_result())


def _train_step(backend: TorchBackend, model: Any, original: Callable[[Any], Any], data: Any) -> Any:
    _check_compiled(model, backend)
    rows = float(len(first_leaf(data)))
    backend.shares.parameter_scale = rows  # what synchronised BatchNorm passes back counts as the gradients do
    with backend.fit.step(rows):
        return _counted_step(backend, model, original, data, rows)


def _test_step(backend: TorchBackend, model: Any, original: Callable[[Any], Any], data: Any) -> Any:
    backend.fit.rows = rows = float(len(first_leaf(data)))
    return _counted_step(backend, model, original, data, rows)


def _counted_step(backend: TorchBackend, model: Any, original: Callable[[Any], Any], data: Any, rows: float) -> Any:
    """A step whose losses count by their own denominators; one without a row computes on zeros and leaves the metrics as they were."""
    variables = [v for metric in model.metrics for v in metric.variables] if rows == 0 else []
    before = [v.value.clone() for v in variables]
    backend.shares.empty = rows == 0
    if rows == 0:
        data = map_nest(lambda leaf: leaf if leaf is None else leaf.new_zeros((1, *leaf.shape[1:])), data)
    with counted_losses(lambda loss, denominator: _by_rows(backend, loss, denominator, rows)):
        logs = original(data)
    backend.shares.empty = False
    for variable, value in zip(variables, before):
        variable.assign(value)
    return logs


def _by_rows(backend: TorchBackend, loss: torch.Tensor, denominator: Any, rows: float) -> torch.Tensor:
    """A local loss so that the mean over ranks, weighted by rows, is the loss of the whole batch by its own denominator."""
    own = loss.new_tensor(1.0) if denominator is SUM else denominator.detach().to(loss.dtype)
    total, all_rows = backend.transport.all_reduce(torch.stack([own, own.new_tensor(rows)]), "sum")
    if rows == 0:
        return loss
    if denominator is SUM:
        return loss * (all_rows / rows)
    return loss * torch.where(total > 0, own / total * all_rows / rows, torch.zeros_like(total))


def counted(loss: Any, targets: Any, outputs: Any, sample_weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A Keras loss as (mean, None), or as (total, weight) when it divides by something else than the samples.

    Raises UnsupportedError for one with reduction="sum".
    """
    found: list[Any] = []
    with counted_losses(lambda value, denominator: found.append(denominator) or value):
        value = loss(targets, outputs, sample_weight=sample_weight)
    if any(denominator is SUM for denominator in found):
        raise UnsupportedError(
            f"the loss {loss.name!r} has reduction='sum', which counts a batch by its size; use 'sum_over_batch_size', or a function "
            "that returns (total, weight)"
        )
    if value.ndim:  # reduction="none": one value for each sample, or for each of its parts
        return value.reshape(value.shape[0], -1).mean(1).mean(), None
    if not found:
        return value, None
    weight = found[0].detach().to(value.dtype)
    return value * weight, weight


def _check_compiled(model: Any, backend: TorchBackend) -> None:
    """Raise UnsupportedError when fit is about to train with an optimizer that exchanges nothing."""
    optimizer = model.optimizer
    if is_scaling(optimizer) and is_put(optimizer.inner_optimizer, "apply"):  # put around it by compile, under mixed_float16
        adapt_optimizer(optimizer, None, backend)
    if optimizer is not None and not is_put(optimizer, "apply"):
        raise UnsupportedError(
            f"the model was compiled with a {type(optimizer).__name__} that did not go through wrap_optimizer, so the ranks' gradients "
            "would not be averaged; call model.compile(unidist.wrap_optimizer(optimizer, model), ...)"
        )


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
        put(optimizer, "apply", functools.partial(_apply, backend, optimizer))
        if is_scaling(optimizer):  # the one inside gets gradients that are reduced already
            remove(optimizer.inner_optimizer, "apply")


def is_scaling(optimizer: Any) -> bool:
    """Whether it is a LossScaleOptimizer."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale(optimizer: Any) -> Any:
    """What the loss is multiplied by and the optimizer divides gradients by: a number or 0-d tensor, None where nothing is."""
    return optimizer.dynamic_scale.value if is_scaling(optimizer) else optimizer.loss_scale_factor


def _apply(backend: TorchBackend, optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
    variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
    backend.check_keras(optimizer, variables)
    weight = backend.fit.weight
    scale = None if weight is not None or backend.fit.stepping else backend.shares.seen().scale
    with torch.no_grad():
        reduced = backend.average_keras(grads, variables, scale=scale, weight=weight)
        return type(optimizer).apply(optimizer, reduced, trainable_variables)


def average(gradients: Sequence[Any], variables: Sequence[Any], scale: float | None, weight: Any, transport: Transport) -> list[Any]:
    """Reduced gradients through one flat buffer; a flag for each tells whether it was used on any rank, else it is None.

    With `scale` the local ones are multiplied by it before a plain mean; with `weight` the result is the sum of weighted
    gradients over the sum of weights, which rides along.
    """
    values = [v.value for v in variables]
    dtype = max((v.dtype for v in values), key=lambda d: d.itemsize)
    factor = float(weight) if weight is not None else 1.0 if scale is None else scale
    parts = [_flat(g, v, factor, dtype) for g, v in zip(gradients, values)]
    counts = [float(g is not None) for g in gradients] + [1.0 if weight is None else float(weight)]
    sent = torch.cat([*parts, torch.tensor(counts, dtype=dtype, device=parts[0].device)])
    total = transport.sum_(sent, "sum")
    *used, divisor = total[-len(counts) :].tolist()
    pieces = total[: -len(counts)].split([part.numel() for part in parts])
    return [(piece / divisor).reshape(v.shape).to(v.dtype) if flag else None for piece, v, flag in zip(pieces, values, used)]


def _flat(gradient: Any, value: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    if gradient is None or factor == 0.0:
        return torch.zeros(value.numel(), dtype=dtype, device=value.device)
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1).to(dtype)
    return flat if factor == 1.0 else flat * factor


def same_hyperparameters(optimizer: Any, root: int, objects: Callable[[Any, int], Any]) -> None:
    """Rank `root`'s plain hyper-parameters on the others; variables (iterations, learning rate, slots) travel as tensors."""
    config = objects(optimizer.get_config(), root)
    for name, value in config.items():
        if isinstance(value, (int, float, bool, str, type(None))) and name not in ("name", "learning_rate") and hasattr(optimizer, name):
            setattr(optimizer, name, value)
    if is_scaling(optimizer):
        same_hyperparameters(optimizer.inner_optimizer, root, objects)
