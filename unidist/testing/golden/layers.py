"""Layers in NumPy float64: forward and backward written out, shapes and names as in Keras."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""Float64, but for ids and class targets, which are int64."""

Weights: TypeAlias = dict[str, Array]
"""Float64 arrays by name, in model order; gradients have the same keys."""


class Layer(ABC):
    """One layer without state: its weights are handed in, `n` is the number of samples."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the layer's weights by name, in order; a layer without weights has none."""
        return {}

    @abstractmethod
    def forward(self, weights: Mapping[str, Array], inputs: Array) -> Array:
        """Outputs (n, ...) for inputs (n, ...)."""

    @abstractmethod
    def backward(self, weights: Mapping[str, Array], inputs: Array, outputs: Array, upstream: Array) -> tuple[Array, Weights]:
        """Gradients of sum(outputs * upstream) by the inputs and by the weights; `upstream` is shaped like outputs."""


@dataclass(frozen=True)
class Dense(Layer):
    """outputs = inputs @ kernel + bias; kernel (num_inputs, num_outputs), bias (num_outputs,)."""

    num_inputs: int
    num_outputs: int
    use_bias: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        kernel = {"kernel": (self.num_inputs, self.num_outputs)}
        return kernel | ({"bias": (self.num_outputs,)} if self.use_bias else {})

    def forward(self, weights: Mapping[str, Array], inputs: Array) -> Array:
        return inputs @ weights["kernel"] + weights.get("bias", 0.0)

    def backward(self, weights: Mapping[str, Array], inputs: Array, outputs: Array, upstream: Array) -> tuple[Array, Weights]:
        gradients = {"kernel": inputs.T @ upstream, "bias": upstream.sum(axis=0)}
        return upstream @ weights["kernel"].T, {name: gradients[name] for name in self.shapes()}


@dataclass(frozen=True)
class Tanh(Layer):
    """outputs = tanh(inputs), any shape; d tanh(x)/dx = 1 - tanh(x)^2."""

    def forward(self, weights: Mapping[str, Array], inputs: Array) -> Array:
        return np.tanh(inputs)

    def backward(self, weights: Mapping[str, Array], inputs: Array, outputs: Array, upstream: Array) -> tuple[Array, Weights]:
        return upstream * (1.0 - outputs**2), {}


@dataclass(frozen=True)
class Embedding(Layer):
    """Ids (n, positions), int64, to rows (n, positions, width) of embeddings (num_rows, width)."""

    num_rows: int
    width: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"embeddings": (self.num_rows, self.width)}

    def forward(self, weights: Mapping[str, Array], inputs: Array) -> Array:
        rows: Array = weights["embeddings"][inputs]
        return rows

    def backward(self, weights: Mapping[str, Array], inputs: Array, outputs: Array, upstream: Array) -> tuple[Array, Weights]:
        gradient = np.zeros_like(weights["embeddings"])
        np.add.at(gradient, inputs, upstream)  # an id that occurs twice counts twice
        return np.zeros(inputs.shape), {"embeddings": gradient}  # ids have no gradient


@dataclass(frozen=True)
class MeanOverPositions(Layer):
    """(n, positions, width) to (n, width): Keras' GlobalAveragePooling1D, torch's x.mean(1)."""

    def forward(self, weights: Mapping[str, Array], inputs: Array) -> Array:
        mean: Array = inputs.mean(axis=1)
        return mean

    def backward(self, weights: Mapping[str, Array], inputs: Array, outputs: Array, upstream: Array) -> tuple[Array, Weights]:
        positions = inputs.shape[1]
        return np.repeat(upstream[:, None, :], positions, axis=1) / positions, {}
