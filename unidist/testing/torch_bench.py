"""The bench of torch's own modules and optimizers; imported in workers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unidist.testing import golden
from unidist.testing.bench import CLASS_WEIGHTS, Bench, golden_layout


class Mean(torch.nn.Module):
    """The mean over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, positions, width) to (n, width)."""
        return x.mean(1)


class Chain(torch.nn.Sequential):
    """A network's layers; takes its input by position or as `features`, and knows its network."""

    network: golden.Network

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        for layer in self:
            features = layer(features)
        return features


class Twice(torch.nn.Module):
    """One square layer, known under two names."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        num_inputs, num_outputs = weight.shape
        self.first = torch.nn.Linear(num_inputs, num_outputs, bias=False).double()
        self.second = torch.nn.Linear(num_inputs, num_outputs, bias=False).double()
        self.second.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.copy_(torch.from_numpy(weight.T.copy()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer applied twice."""
        return self.second(self.first(x))  # type: ignore[no-any-return]


_MAKERS: dict[type, Callable[[Any], torch.nn.Module]] = {
    golden.Dense: lambda layer: torch.nn.Linear(layer.num_inputs, layer.num_outputs, bias=layer.use_bias),
    golden.Tanh: lambda layer: torch.nn.Tanh(),
    golden.Embedding: lambda layer: torch.nn.Embedding(layer.num_rows, layer.width),
    golden.MeanOverPositions: lambda layer: Mean(),
}


class TorchBench(Bench):
    """torch.nn.Module and torch.optim."""

    flavour = "native"
    formula = "torch"
    tolerance = 1e-10
    clip_epsilon = 1e-6
    module = torch

    def _build(self, network: golden.Network, weights: golden.Weights, named_inputs: bool) -> Any:
        model = Chain(*[_MAKERS[type(layer)](layer) for layer in network.layers]).double()
        model.network = network
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), golden.torch_layout(weights).values(), strict=True):
                parameter.copy_(torch.from_numpy(value))
        return model

    def _freeze(self, model: Any, network: golden.Network, number: str) -> None:
        for name, parameter in zip(network.shapes(), model.parameters(), strict=True):
            if name.startswith(f"{number}/"):
                parameter.requires_grad_(False)

    def tied(self, weight: Any) -> Any:
        return Twice(weight)

    def normalised(self, features: int, momentum: float) -> Any:
        first, last = torch.nn.Linear(features, features, bias=False), torch.nn.Linear(features, 1, bias=False)
        torch.nn.init.eye_(first.weight)
        torch.nn.init.ones_(last.weight)
        return torch.nn.Sequential(first, torch.nn.BatchNorm1d(features, eps=2.0**-10, momentum=1.0 - momentum), last).double()

    def statistics(self, model: Any) -> tuple[Any, Any]:
        return self.array(model[1].running_mean), self.array(model[1].running_var)

    def unbiased(self) -> bool:
        return True

    def _optimizer(self, truth: Any, model: Any) -> Any:
        if hasattr(truth, "momentum"):
            return torch.optim.SGD(model.parameters(), lr=truth.learning_rate, momentum=truth.momentum)
        return torch.optim.Adam(model.parameters(), lr=truth.learning_rate, betas=(truth.beta_1, truth.beta_2), eps=truth.epsilon)

    def loss(self, network: str, form: str = "mean") -> Any:
        classes = golden.NETWORKS[network].loss is golden.CROSS_ENTROPY
        if form == "object":
            return torch.nn.CrossEntropyLoss() if classes else torch.nn.MSELoss()
        values = _cross_entropy if classes else _squared_error
        if form == "samples":
            return values
        if form == "mean":
            return lambda outputs, targets: values(outputs, targets).mean()
        if not classes:
            return lambda outputs, targets: (values(outputs, targets).sum(), len(targets))

        def total(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights = torch.tensor(CLASS_WEIGHTS, dtype=outputs.dtype, device=outputs.device)[targets]
            return (weights * values(outputs, targets)).sum(), weights.sum()

        return total

    def weights(self, model: Any) -> golden.Weights:
        values = [self.array(parameter) for parameter in model.parameters()]
        return golden.torch_layout(golden_layout(model.network, values)) if hasattr(model, "network") else dict(enumerate(values))  # type: ignore[arg-type]

    def forward(self, model: Any, inputs: Any, *, training: bool = False) -> Any:
        before = model.training
        model.train(training)
        with torch.no_grad():
            outputs = model(self.tensor(inputs))
        model.train(before)
        return self.array(outputs)

    def learning_rate(self, optimizer: Any) -> float:
        return float(optimizer.param_groups[0]["lr"])

    def tensor(self, values: Any, dtype: str | None = None) -> Any:
        made = torch.as_tensor(np.asarray(values))
        return made.to(device=self.backend.device, dtype=getattr(torch, dtype) if dtype else None)

    def array(self, tensor: Any) -> Any:
        return np.array(tensor.detach().cpu().numpy())

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def numbers(self, tensor: Any) -> Any:
        return self.array(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64))

    def ops(self) -> Any:
        return torch


def _squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean(1)


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
