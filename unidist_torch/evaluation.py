"""Evaluation and prediction on PyTorch: a model's outputs for this process's share, and what losses and metrics make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unidist import frameworks
from unidist.batch import Share
from unidist.nest import map_nest
from unidist_torch import tensors
from unidist_torch.class_losses import as_total, scalar_weight
from unidist_torch.step import Losses, unpack
from unidist_torch.transport import Transport


def evaluate_batch(model: Any, batch: Any, share: Share | None, loss: Any, metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """(total, weight) by name over this process's share; metric objects are updated with it. A borrowed sample gives nothing."""
    inputs, targets, sample_weight = unpack(batch)
    outputs = infer(model, inputs)
    if share is not None and share.size == 0:
        return {}
    size = float(share.size if share is not None else 1)
    found = {}
    if loss is not None:
        value, weight = _counted(Losses(model, loss, None), outputs, targets, sample_weight, share)
        found["loss"] = (float(value) * size, size) if weight is None else (float(value), float(weight))
    with torch.no_grad():
        for name, metric in metrics.items():
            if is_metric(metric):
                metric.update_state(targets, outputs, sample_weight=sample_weight)
            else:
                found[name] = _sums(metric(outputs, targets), size)
    return found


def _counted(losses: Losses, outputs: Any, targets: Any, sample_weight: Any, share: Share | None) -> tuple[torch.Tensor, Any]:
    """(mean, None) or (total, weight); a graph over the outputs alone shows what torch's class losses divide by."""
    outputs = map_nest(lambda leaf: leaf.detach().requires_grad_() if _is_floating(leaf) else leaf, outputs)
    with torch.enable_grad():
        value, weight = losses.of_outputs(outputs, targets, sample_weight)
        found = scalar_weight(value, share) if weight is None else None
    value = value.detach()
    return (value, weight) if found is None else (as_total(value, found), found)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def infer(model: Any, inputs: Any) -> Any:
    """Outputs in evaluation mode, without gradients; the model's mode is as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return Losses(model, None, None).outputs(inputs, training=False)
    finally:
        model.train(was_training)


def predict_batch(model: Any, batch: Any, share: Share | None) -> Any:
    """Outputs as NumPy arrays, without borrowed rows."""
    outputs = infer(model, unpack(batch)[0])
    return map_nest(lambda rows: tensors.as_array(rows[: share.size] if share is not None else rows), outputs)


def is_metric(metric: Any) -> bool:
    """Whether this is a metric object of Keras."""
    return frameworks.is_keras(metric) and hasattr(metric, "update_state")


def merge_metric(transport: Transport, metric: Any) -> float:
    """The metric of all ranks' samples: its state is a sum of what it counted. Its own state then begins anew."""
    for variable in metric.variables:
        variable.assign(transport.all_reduce(variable.value.detach().contiguous(), "sum"))
    result = float(metric.result())
    metric.reset_state()
    return result


def _sums(values: torch.Tensor, size: float) -> tuple[float, float]:
    if values.ndim == 0:
        return float(values) * size, size
    return float(values.double().sum()), float(values.numel())
