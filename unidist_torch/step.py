"""The training step on PyTorch: forward, backward, and at the end of a window the exchange, clipping and the update."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch

from unidist import frameworks
from unidist.base import Step, StepOptions
from unidist.batch import Share, check_batchnorm
from unidist.errors import UnsupportedError
from unidist.nest import map_nest
from unidist_torch.batchnorm import keras_alone
from unidist_torch.class_losses import as_total, class_weight, scalar_weight
from unidist_torch.precision import Autocast, check_precision, make_scaler

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """(inputs, targets, sample_weight) of a batch, each None where the batch has none."""
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2, 3) and not hasattr(batch, "_fields"):
        return (*batch, None, None)[:3]
    return batch, None, None


def holds_arrays(batch: Any) -> bool:
    """Whether the first leaf of a batch is a NumPy array; asked every step, so it looks no further."""
    first = batch
    while not isinstance(first, torch.Tensor):
        if isinstance(first, (tuple, list)) and first:
            first = first[0]
        elif isinstance(first, Mapping) and first:
            first = next(iter(first.values()))
        else:
            return isinstance(first, numpy.ndarray)
    return False


def to_tensors(value: Any, device: torch.device) -> Any:
    """NumPy arrays of a nest as tensors on the device; the rest as it is."""
    return map_nest(lambda leaf: torch.from_numpy(leaf).to(device) if isinstance(leaf, numpy.ndarray) else leaf, value)


class Losses:
    """A user's loss in one form: (value, weight), a mean with weight None, or a total with its weight."""

    def __init__(self, model: Any, loss: Any, compute_loss: Any) -> None:
        self._model = model
        self._loss = loss
        self._compute_loss = compute_loss
        self._keras_loss = loss is not None and frameworks.is_keras(loss)
        if getattr(loss, "reduction", None) == "sum":
            raise UnsupportedError(
                f"the loss {type(loss).__name__} has reduction='sum', which counts a batch by its size; use a mean, or a function that "
                "returns (total, weight)"
            )
        self._keras_model = frameworks.is_keras(model)
        self._class_loss: Any = None
        if isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)) and loss.reduction == "mean":
            self._class_loss = copy.copy(loss)
            self._class_loss.reduction = "sum"

    def __call__(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of a training batch."""
        if self._compute_loss is not None:
            result = self._compute_loss(self._model, batch)
            value = self._reduced(result, None)
        else:
            inputs, targets, sample_weight = unpack(batch)
            value = self.of_outputs(self.outputs(inputs, training=True), targets, sample_weight)
        return self._with_penalties(value) if self._keras_model else value

    def outputs(self, inputs: Any, *, training: bool) -> Any:
        """The model's outputs: a tuple is positional and a dict keywords for a torch module, one structure for a Keras model."""
        if self._keras_model:
            return self._model(inputs, training=training)
        if isinstance(inputs, torch.Tensor):
            return self._model(inputs)
        if isinstance(inputs, Mapping):
            return self._model(**inputs)
        return self._model(*inputs) if isinstance(inputs, (tuple, list)) else self._model(inputs)

    def of_outputs(self, outputs: Any, targets: Any, sample_weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of outputs that are there."""
        if self._keras_loss:
            from unidist_torch.keras import counted

            return counted(self._loss, targets, outputs, sample_weight)
        if self._class_loss is not None and sample_weight is None and not targets.is_floating_point():
            weight = class_weight(self._loss, targets)
            if weight is not None:
                total = self._class_loss(outputs, targets)
                return total, weight.to(total.dtype)
        return self._reduced(self._loss(outputs, targets), sample_weight)

    def _reduced(self, result: Any, sample_weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(result, tuple):
            total, weight = result
            total = total.to(torch.promote_types(total.dtype, torch.float32))  # half precision can't count above some hundreds
            return total, torch.as_tensor(weight, dtype=total.dtype, device=total.device).detach()
        if result.ndim == 0:
            if sample_weight is not None:
                raise UnsupportedError(
                    "the batch has sample weights, and the loss returned a scalar, to which they can't be applied; return one "
                    "value per sample (reduction='none') or (total, weight)"
                )
            return result, None
        values = result.reshape(result.shape[0], -1).mean(1)
        return (values if sample_weight is None else values * sample_weight.to(values.dtype)).mean(), None

    def _with_penalties(self, value: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The losses that Keras layers and regularisers add, once."""
        loss, weight = value
        penalties = self._model.losses
        if penalties:
            added = sum(penalties)
            loss = loss + (added if weight is None else added * weight)
        return loss, weight


class TorchStep(Step):
    """A step for native and Keras models, with torch's optimizers (exchange in backward) or Keras' (in apply)."""

    def __init__(self, backend: TorchBackend, model: Any, optimizer: Any, options: StepOptions) -> None:
        super().__init__(backend, model, options)
        self._torch = backend
        self._optimizer = optimizer
        check_precision(model, options.precision)
        losses = Losses(model, options.loss, options.compute_loss)
        self._losses_of = losses if options.precision is None else Autocast(losses, backend.device, options.precision)
        self._native = isinstance(optimizer, torch.optim.Optimizer)
        self._engines = backend.engines.of(model)
        self._summed = backend.world.size > 1 or options.accumulation > 1  # what a loss divides by then has to be known
        self._alone = keras_alone(model) if backend.world.size > 1 else []
        self._weights: list[torch.Tensor] = []
        backend.check_step(model, optimizer)
        self.scaler = make_scaler(backend, options, self._native)

    def _run(self, batch: Any, share: Share | None, factor: float) -> tuple[Any, Any]:
        window = self._window
        if share is not None and any(layer.trainable for layer in self._alone):
            check_batchnorm(share)
        if window.count == 1:
            self._begin()
        if not window.complete:
            self._torch.shares.hold()
        if holds_arrays(batch):
            batch = to_tensors(batch, self._torch.device)
        value, weight = self._losses_of(batch)
        if weight is None and self._summed:
            weight = scalar_weight(value, share)
            value = value if weight is None else as_total(value, weight)
        empty = share is not None and share.size == 0
        if weight is not None:
            self._weights.append(weight * (not empty))
        self._torch.shares.parameter_scale = 0.0 if empty else 1.0
        for engine in self._engines:
            if empty or engine._scaled:
                engine.scale_gradients(0.0 if empty else 1.0)
        if window.complete:
            factor = self._finish_factor(factor, weight is not None)
        elif weight is not None:
            factor = 1.0
        loss = value if factor == 1.0 else value * (factor or 1.0)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        elif not self._native:
            loss = self._optimizer.scale_loss(loss)
        if self._engines:
            self._torch.run_backward(loss)
        else:
            self._backward_alone(loss, empty)
        if window.complete:
            self._update()
        return self._result(value.detach(), weight, share, empty)

    def _begin(self) -> None:
        self._weights.clear()
        if self._native:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._model.zero_grad()

    def _finish_factor(self, factor: float, weighted: bool) -> Any:
        """The factor of a window's last batch; what the window has summed before is brought to the same measure."""
        window = self._window
        if weighted:
            correction = self._torch.weight_scale(torch.stack(self._weights).sum())
            factor = 1.0
        else:
            correction = window.correction
        if window.count > 1 and (weighted or correction != 1.0):
            gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, correction)
        return factor * correction if weighted or correction != 1.0 else factor

    def _backward_alone(self, loss: torch.Tensor, empty: bool) -> None:
        """Where no engine is told how a pass counts (a Keras optimizer exchanges): a borrowed sample adds zeros."""
        if not empty:
            self._torch.run_backward(loss)
            return
        kept = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        self._torch.run_backward(loss)
        for parameter, gradient in kept:
            if gradient is not None or parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient

    def _update(self) -> None:
        options = self._options
        if self._native:
            self._torch.engines.check(self._engines)
            if self.scaler is not None:
                self.scaler.unscale_(self._optimizer)
            if options.clip_norm is not None or options.clip_value is not None:
                self.last_norm = self._torch._clip(self._optimizer, max_norm=options.clip_norm, max_value=options.clip_value)
            if self.scaler is None:
                self._optimizer.step()
            else:
                self._scaled_step()
            return
        variables = self._model.trainable_variables
        gradients = [v.value.grad for v in variables]
        with torch.no_grad():
            gradients = self._torch.average_keras(gradients, variables, scale=1.0, weight=None)
            if options.clip_norm is not None or options.clip_value is not None:
                gradients, self.last_norm = self._clip_keras(gradients)
            type(self._optimizer).apply(self._optimizer, gradients, variables)

    def _scaled_step(self) -> None:
        """The update, unless a gradient is not finite: it is reduced already, so that all ranks skip it or none does."""
        before = self.scaler.get_scale()
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self._skipped = self.scaler.get_scale() < before

    def _clip_keras(self, gradients: list[Any]) -> tuple[list[Any], Any]:
        """Clipped without the loss scale that a Keras optimizer will divide by; what is not finite stays so, for it to see."""
        from unidist_torch.keras import loss_scale

        scale = loss_scale(self._optimizer)
        if scale is None:
            return clip(gradients, self._options.clip_norm, self._options.clip_value)
        clipped, norm = clip([g if g is None else g / scale for g in gradients], self._options.clip_norm, self._options.clip_value)
        if norm is None:
            norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None]) / scale
        back = scale if torch.isfinite(norm) else float("nan")
        return [g if g is None else g * back for g in clipped], norm

    def _result(self, value: torch.Tensor, weight: Any, share: Share | None, empty: bool) -> tuple[Any, Any]:
        if empty:
            return torch.zeros_like(value), 0.0
        if weight is not None:
            return torch.where(weight > 0, value / weight, torch.zeros_like(value)), weight
        return value, 1.0 if share is None else float(share.size)

    def _to_floats(self, pairs: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        if not pairs:
            return []
        losses = torch.stack([loss for loss, _ in pairs]).tolist()
        return [(loss, float(weight)) for loss, (_, weight) in zip(losses, pairs)]


def clip(gradients: list[Any], max_norm: float | None, max_value: float | None) -> tuple[list[Any], Any]:
    """Gradients clipped in place by torch's own formulas, and their global norm before (None when not asked for)."""
    present = [g for g in gradients if g is not None]
    norm = None
    if max_norm is not None:
        norm = torch.nn.utils.get_total_norm(present)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(present, factor.to(present[0].device) if present else factor)
    if max_value is not None:
        for gradient in present:
            gradient.clamp_(-max_value, max_value)
    return gradients, norm
