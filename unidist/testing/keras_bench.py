"""The bench of Keras models on either framework; imported in workers only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from unidist.testing import golden
from unidist.testing.bench import CLASS_WEIGHTS, Bench, golden_layout

keras.config.set_floatx("float64")
if keras.backend.backend() == "torch":
    # Keras imports TensorFlow when it writes a config, if it is there; after torch that takes seconds and can crash.
    sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]

_MAKERS: dict[type, Callable[[Any], Any]] = {
    golden.Dense: lambda layer: keras.layers.Dense(layer.num_outputs, use_bias=layer.use_bias),
    golden.Tanh: lambda layer: keras.layers.Activation("tanh"),
    golden.Embedding: lambda layer: keras.layers.Embedding(layer.num_rows, layer.width),
    golden.MeanOverPositions: lambda layer: keras.layers.GlobalAveragePooling1D(),
}
_POSITIONS = 3  # ids in a sample
# Keras on torch multiplies matrices in float32.
_TOLERANCE = {"torch": 1e-5, "tensorflow": 1e-10}
_CLIP_EPSILON = {"torch": 1e-6, "tensorflow": 0.0}


class KerasBench(Bench):
    """Keras models and optimizers."""

    flavour = "keras"
    formula = "keras"
    tolerance = _TOLERANCE[keras.backend.backend()]
    clip_epsilon = _CLIP_EPSILON[keras.backend.backend()]
    module = keras

    def _build(self, network: golden.Network, weights: golden.Weights, named_inputs: bool) -> Any:
        ids = isinstance(network.layers[0], golden.Embedding)
        first = keras.Input((_POSITIONS,) if ids else (network.layers[0].num_inputs,), dtype="int64" if ids else "float64", name="features")  # type: ignore[attr-defined]
        value = first
        for layer in network.layers:
            value = _MAKERS[type(layer)](layer)(value)
        model = keras.Model({"features": first} if named_inputs else first, value)
        model.golden_network = network
        model.set_weights(list(weights.values()))
        return model

    def _freeze(self, model: Any, network: golden.Network, number: str) -> None:
        layers = [layer for layer in model.layers if layer.weights]
        layers[int(number)].trainable = False

    def tied(self, weight: Any) -> Any:
        layer = keras.layers.Dense(len(weight), use_bias=False)
        first = keras.Input((len(weight),))
        model = keras.Model(first, layer(layer(first)))
        model.set_weights([weight])
        return model

    def normalised(self, features: int, momentum: float) -> Any:
        layers = keras.layers
        return keras.Sequential([
            keras.Input((features,)), layers.Dense(features, use_bias=False, kernel_initializer="identity"),
            layers.BatchNormalization(momentum=momentum, epsilon=2.0**-10), layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ])  # fmt: skip

    def masked(self, steps: int) -> Any:
        return keras.Sequential([
            keras.Input((steps, 1)), keras.layers.Masking(), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ])  # fmt: skip

    def two_outputs(self) -> Any:
        first = keras.Input((2,))
        dense = keras.layers.Dense
        return keras.Model(first, [dense(1, kernel_initializer="ones")(first), dense(1, kernel_initializer="ones")(first)])

    def statistics(self, model: Any) -> tuple[Any, Any]:
        layer = model.layers[1]
        return self.array(layer.moving_mean), self.array(layer.moving_variance)

    def unbiased(self) -> bool:
        return False

    def _optimizer(self, truth: Any, model: Any) -> Any:
        if hasattr(truth, "momentum"):
            return keras.optimizers.SGD(truth.learning_rate, momentum=truth.momentum)
        return keras.optimizers.Adam(truth.learning_rate, beta_1=truth.beta_1, beta_2=truth.beta_2, epsilon=truth.epsilon)

    def loss(self, network: str, form: str = "object") -> Any:
        classes = golden.NETWORKS[network].loss is golden.CROSS_ENTROPY
        if form == "object":
            losses = keras.losses
            return losses.SparseCategoricalCrossentropy(from_logits=True) if classes else losses.MeanSquaredError()
        values = _cross_entropy if classes else _squared_error
        if form == "samples":
            return values
        if form == "mean":
            return lambda outputs, targets: keras.ops.mean(values(outputs, targets))
        if not classes:
            return lambda outputs, targets: (keras.ops.sum(values(outputs, targets)), keras.ops.shape(targets)[0])

        def total(outputs: Any, targets: Any) -> tuple[Any, Any]:
            weights = keras.ops.take(keras.ops.convert_to_tensor(CLASS_WEIGHTS, "float64"), targets)
            return keras.ops.sum(weights * values(outputs, targets)), keras.ops.sum(weights)

        return total

    def weights(self, model: Any) -> golden.Weights:
        values = [np.array(value) for value in model.get_weights()]
        return golden_layout(model.golden_network, values) if hasattr(model, "golden_network") else dict(enumerate(values))  # type: ignore[arg-type]

    def forward(self, model: Any, inputs: Any, *, training: bool = False) -> Any:
        return self.array(model(self.tensor(inputs), training=training))

    def learning_rate(self, optimizer: Any) -> float:
        return float(self.array(optimizer.learning_rate))

    def tensor(self, values: Any, dtype: str | None = None) -> Any:
        return keras.ops.convert_to_tensor(np.asarray(values), dtype)

    def array(self, tensor: Any) -> Any:
        return np.array(keras.ops.convert_to_numpy(tensor))

    def dtype(self, tensor: Any) -> str:
        return str(keras.backend.standardize_dtype(tensor.dtype))

    def is_tensor(self, value: Any) -> bool:
        return bool(keras.ops.is_tensor(value))

    def numbers(self, tensor: Any) -> Any:
        return self.array(keras.ops.cast(tensor, "complex128" if "complex" in self.dtype(tensor) else "float64"))

    def ops(self) -> Any:
        return keras.ops


def _squared_error(outputs: Any, targets: Any) -> Any:
    return keras.ops.mean(keras.ops.square(outputs - targets), axis=1)


def _cross_entropy(outputs: Any, targets: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
