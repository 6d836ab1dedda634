"""SGD with momentum and Adam in NumPy float64, in torch's and in Keras' own formula.

Optimizers are frozen facts: state goes in and comes out, so one object serves any number of runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from unidist.testing.golden.layers import Array, Weights

Slots: TypeAlias = tuple[Array, ...]
LearningRate: TypeAlias = float | Callable[[int], float]
"""A number, or a function of the number of updates done before (0 at the first)."""


@dataclass(frozen=True)
class State:
    """Updates done, and for each weight the optimizer's own arrays, shaped like it."""

    count: int
    slots: dict[str, Slots]


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer that works on each element alone; learning_rate may be a schedule."""

    learning_rate: LearningRate

    num_slots: ClassVar[int]

    @abstractmethod
    def step(self, weight: Array, gradient: Array, slots: Slots, count: int) -> tuple[Array, Slots]:
        """The new weight and slots of one array; `count` is the number of updates done before. All of one shape."""

    def initial_state(self, weights: Weights) -> State:
        """Zeros; torch's first momentum `buf = g` is `momentum * 0 + g`."""
        return State(0, {name: (np.zeros_like(value),) * self.num_slots for name, value in weights.items()})

    def update(self, weights: Weights, gradients: Weights, state: State) -> tuple[Weights, State]:
        """New weights and state; nothing is changed in place. weights and gradients: same keys and shapes."""
        stepped = {name: self.step(weight, gradients[name], state.slots[name], state.count) for name, weight in weights.items()}
        new_weights = {name: weight for name, (weight, _) in stepped.items()}
        return new_weights, State(state.count + 1, {name: slots for name, (_, slots) in stepped.items()})

    def rate(self, count: int) -> float:
        """The learning rate of the update that follows `count` others."""
        return self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate


@dataclass(frozen=True)
class TorchSGD(Optimizer):
    """buf = momentum*buf + g; p -= lr*buf (torch/optim/sgd.py, `_single_tensor_sgd`, dampening 0, no Nesterov)."""

    momentum: float = 0.0
    num_slots: ClassVar[int] = 1

    def step(self, weight: Array, gradient: Array, slots: Slots, count: int) -> tuple[Array, Slots]:
        buffer = self.momentum * slots[0] + gradient
        return weight - self.rate(count) * buffer, (buffer,)


@dataclass(frozen=True)
class KerasSGD(Optimizer):
    """v = momentum*v - lr*g; p += v (keras/src/optimizers/sgd.py, `update_step`, no Nesterov).

    Equal to TorchSGD while the learning rate is constant: v = -lr*buf. Under a schedule the two differ.
    """

    momentum: float = 0.0
    num_slots: ClassVar[int] = 1

    def step(self, weight: Array, gradient: Array, slots: Slots, count: int) -> tuple[Array, Slots]:
        velocity = self.momentum * slots[0] - self.rate(count) * gradient
        return weight + velocity, (velocity,)


def _adam_moments(gradient: Array, slots: Slots, beta_1: float, beta_2: float) -> Slots:
    first, second = slots
    return first + (gradient - first) * (1.0 - beta_1), second + (gradient**2 - second) * (1.0 - beta_2)


@dataclass(frozen=True)
class TorchAdam(Optimizer):
    """p -= lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps) (torch/optim/adam.py, `_single_tensor_adam`)."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    num_slots: ClassVar[int] = 2

    def step(self, weight: Array, gradient: Array, slots: Slots, count: int) -> tuple[Array, Slots]:
        first, second = _adam_moments(gradient, slots, self.beta_1, self.beta_2)
        step_size = self.rate(count) / (1.0 - self.beta_1 ** (count + 1))
        denominator = np.sqrt(second) / np.sqrt(1.0 - self.beta_2 ** (count + 1)) + self.epsilon
        return weight - step_size * first / denominator, (first, second)


@dataclass(frozen=True)
class KerasAdam(Optimizer):
    """alpha = lr*sqrt(1-b2^t)/(1-b1^t); p -= alpha*m/(sqrt(v) + eps) (keras/src/optimizers/adam.py, `update_step`).

    Differs from TorchAdam by what epsilon is added to: here to sqrt(v) before its bias is corrected.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    num_slots: ClassVar[int] = 2

    def step(self, weight: Array, gradient: Array, slots: Slots, count: int) -> tuple[Array, Slots]:
        first, second = _adam_moments(gradient, slots, self.beta_1, self.beta_2)
        alpha = self.rate(count) * np.sqrt(1.0 - self.beta_2 ** (count + 1)) / (1.0 - self.beta_1 ** (count + 1))
        return weight - alpha * first / (np.sqrt(second) + self.epsilon), (first, second)


# Exact in float32, as 0.125 is: Keras on TensorFlow passes Python numbers through float32 in a float64 model too.
EXACT_SGD = {"momentum": 0.875}
EXACT_ADAM = {"beta_1": 0.875, "beta_2": 1 - 2.0**-9, "epsilon": 2.0**-20}

_FORMULAS: dict[tuple[str, str], Callable[[LearningRate], Optimizer]] = {
    ("torch", "sgd"): lambda rate: TorchSGD(rate, **EXACT_SGD),
    ("torch", "adam"): lambda rate: TorchAdam(rate, **EXACT_ADAM),
    ("keras", "sgd"): lambda rate: KerasSGD(rate, **EXACT_SGD),
    ("keras", "adam"): lambda rate: KerasAdam(rate, **EXACT_ADAM),
}


def make_optimizer(formula: str, name: str, learning_rate: LearningRate = 0.125) -> Optimizer:
    """The optimizer "sgd" or "adam" in the "torch" or "keras" formula, hyper-parameters exact in float32.

    Keras' formula holds for Keras optimizers on both Keras backends.
    """
    if (formula, name) not in _FORMULAS:
        raise ValueError(f"no optimizer {(formula, name)!r}: choose one of {sorted(_FORMULAS)!r}")
    return _FORMULAS[formula, name](learning_rate)
