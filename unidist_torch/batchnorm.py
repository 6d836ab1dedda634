"""BatchNorm over the global batch, on any device: each layer's forward is replaced, its class and keys stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unidist import frameworks
from unidist.errors import UnsupportedError
from unidist_torch.hooks import _BATCHNORM

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend


def synchronise(model: torch.nn.Module, backend: TorchBackend) -> None:
    """Give every BatchNorm layer of the model a forward over all ranks' samples."""
    if frameworks.is_keras(model):
        synchronise_keras(model, backend)
    for module in model.modules():
        if isinstance(module, _BATCHNORM):
            module.forward = Synchronised(module, backend)  # type: ignore[method-assign]


def synchronise_keras(model: Any, backend: TorchBackend) -> None:
    """Give every BatchNormalization layer of a Keras model moments over all ranks' samples."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras_batchnorm()):
            layer._moments = KerasMoments(layer, backend)


def keras_batchnorm() -> Any:
    """Keras' class, imported only where a Keras model is there."""
    from keras.layers import BatchNormalization

    return BatchNormalization


def keras_alone(model: Any) -> list[Any]:
    """The BatchNormalization layers of a Keras model that normalise over the replica's share."""
    layers = model._flatten_layers() if frameworks.is_keras(model) else []
    return [layer for layer in layers if isinstance(layer, keras_batchnorm()) and "_moments" not in vars(layer)]


class KerasMoments:
    """In place of a Keras layer's own moments. A copy of the model has the layer's own again."""

    def __init__(self, layer: Any, backend: TorchBackend) -> None:
        self._layer = layer
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self._layer)._moments.__get__(memo.get(id(self._layer), self._layer))

    def __reduce__(self) -> Any:
        return getattr, (self._layer, "_moments")

    def __call__(self, inputs: torch.Tensor, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if mask is not None:
            raise UnsupportedError("sync_batchnorm does not cover masked inputs on torch")
        channels_second = inputs.movedim(self._layer.axis, 1) if inputs.ndim > 2 else inputs
        mean, variance, _ = _moments(channels_second, [0, *range(2, inputs.ndim)], self._backend)
        return mean, variance


class Synchronised:
    """In place of a BatchNorm layer's forward. A copy of the model has the layer's own again."""

    def __init__(self, module: Any, backend: TorchBackend) -> None:
        self._module = module
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self._module).forward.__get__(memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")  # when this is read again, the layer has its class's own only

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self._module
        if not (module.training or not module.track_running_stats):
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        module._check_input_dim(x)
        axes = [0, *range(2, x.ndim)]
        mean, variance, count = _moments(x, axes, self._backend)
        if module.track_running_stats:
            _track(module, mean.detach(), variance.detach(), count)
        shape = [1, -1] + [1] * (x.ndim - 2)
        scale = torch.rsqrt(variance + module.eps)
        if module.weight is not None:
            scale = scale * module.weight
        shifted = (x - mean.to(x.dtype).view(shape)) * scale.to(x.dtype).view(shape)
        return shifted if module.bias is None else shifted + module.bias.to(x.dtype).view(shape)


def _moments(x: torch.Tensor, axes: list[int], backend: TorchBackend) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance over all ranks' samples, in at least float32; a borrowed sample does not count."""
    values = x if x.dtype is torch.float64 else x.float()
    drop = 0.0 if backend.shares.empty else 1.0
    per_channel = x.numel() / x.shape[1]
    local = torch.cat([values.sum(axes) * drop, values.new_tensor([per_channel * drop])])
    sums = _Sum.apply(local, backend)  # type: ignore[no-untyped-call]
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = values - mean.view([1, -1] + [1] * (x.ndim - 2))
    squares = _Sum.apply((centred * centred).sum(axes) * drop, backend)  # type: ignore[no-untyped-call]
    return mean, squares / count, count


def _track(module: Any, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    """Running statistics as the layer itself keeps them: unbiased variance, its momentum or the cumulative mean."""
    module.num_batches_tracked.add_(1)
    momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    unbiased = variance * (count / (count - 1).clamp(min=1))
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Going back, each rank's part counts as its gradients do where plain backward passes scale them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, backend: TorchBackend) -> torch.Tensor:
        ctx.backend = backend
        return backend.transport.all_reduce(tensor.contiguous(), "sum")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scale = ctx.backend.shares.parameter_scale
        total = ctx.backend.transport.all_reduce((gradients[0] * scale).contiguous(), "sum")
        return (total / scale if scale else torch.zeros_like(total)), None
