"""The four networks of the truth, a table of layers and a loss each, with initial weights from a seeded generator.

Weights are named "0/kernel", "0/bias", "1/kernel", ...: the number counts the layers that have weights. Shapes are
Keras' (kernel (in, out)); `torch_layout` says how torch holds them. The order is that of Keras' `model.weights` and of
torch's `model.parameters()`, so values are handed over by position.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unidist.testing.golden.layers import Array, Dense, Embedding, Layer, MeanOverPositions, Tanh, Weights
from unidist.testing.golden.losses import CROSS_ENTROPY, MSE, Loss


@dataclass(frozen=True)
class Network:
    """Layers applied one after the other, and the loss of their output; `constant`, if any, is every initial weight."""

    name: str
    layers: tuple[Layer, ...]
    loss: Loss
    constant: float | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by name, in model order."""
        return {f"{prefix}/{key}": shape for prefix, layer in self._named_layers() for key, shape in layer.shapes().items()}

    def forward(self, weights: Weights, inputs: Array) -> Array:
        """Outputs (n, ...) for inputs (n, ...)."""
        return self._activations(weights, inputs)[-1]

    def backward(self, weights: Weights, inputs: Array, upstream: Array) -> Weights:
        """Gradients of sum(outputs * upstream) by all weights, in model order; `upstream` is shaped like outputs."""
        activations = self._activations(weights, inputs)
        gradients: Weights = {}
        for index, (prefix, layer) in reversed(list(enumerate(self._named_layers()))):
            own = self._own(weights, prefix, layer)
            upstream, found = layer.backward(own, activations[index], activations[index + 1], upstream)
            gradients |= {f"{prefix}/{key}": value for key, value in found.items()}
        return {name: gradients[name] for name in self.shapes()}

    def _activations(self, weights: Weights, inputs: Array) -> list[Array]:
        """The inputs and the outputs of every layer."""
        activations = [inputs]
        for prefix, layer in self._named_layers():
            activations.append(layer.forward(self._own(weights, prefix, layer), activations[-1]))
        return activations

    def _named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with the prefix of their weights; a layer without weights gets the one of the next, and uses none."""
        count = 0
        for layer in self.layers:
            yield str(count), layer
            count += bool(layer.shapes())

    @staticmethod
    def _own(weights: Weights, prefix: str, layer: Layer) -> Weights:
        return {key: weights[f"{prefix}/{key}"] for key in layer.shapes()}


NETWORKS = {
    network.name: network
    for network in (
        # Toy W1 of the field cases: inputs (n, 1), targets (n, 1); on data x = 1..n, y = 2x.
        Network("linear", (Dense(1, 1, use_bias=False),), MSE, constant=1.0),
        # Inputs (n, 3), targets (n, 2), float64.
        Network("mlp", (Dense(3, 4), Tanh(), Dense(4, 2)), MSE),
        # Inputs (n, 4), float64; targets (n,), int64, in 0..2; tanh, since relu's kink defeats finite differences.
        Network("classifier", (Dense(4, 5), Tanh(), Dense(5, 3)), CROSS_ENTROPY),
        # Inputs: ids (n, 3), int64, in 0..6; targets (n, 1), float64.
        Network("embedding", (Embedding(7, 2), MeanOverPositions(), Dense(2, 1)), MSE),
    )
}


def initial_weights(name: str, *, seed: int = 0) -> Weights:
    """Float64 weights of the network `name`, the same for the same seed; biases are not zero, so that each shows."""
    network = NETWORKS[name]
    if network.constant is not None:
        return {key: np.full(shape, network.constant) for key, shape in network.shapes().items()}
    generator = np.random.default_rng(seed)
    return {key: 0.5 * generator.standard_normal(shape) for key, shape in network.shapes().items()}


def torch_layout(weights: Weights) -> Weights:
    """The same weights as torch holds them, and back: the function is its own inverse. Keys and order stay.

    `torch.nn.Linear.weight` is (out, in), the transpose of Keras' kernel; biases and embeddings are held alike.
    """
    return {name: value.T.copy() if name.endswith("/kernel") else value for name, value in weights.items()}
