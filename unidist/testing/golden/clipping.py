"""Clipping of gradients by their global norm or by value."""

from dataclasses import dataclass

import numpy as np

from unidist.testing.golden.layers import Weights


def global_norm(gradients: Weights) -> float:
    """The L2 norm of all gradients together."""
    return float(np.sqrt(sum(float((value**2).sum()) for value in gradients.values())))


def clip_by_norm(gradients: Weights, max_norm: float, *, epsilon: float = 0.0) -> Weights:
    """Gradients times min(1, max_norm / (norm + epsilon)).

    Epsilon 0 is exact, and Keras' `global_clipnorm`. `torch.nn.utils.clip_grad_norm_` adds 1e-6 to the norm, so its
    gradients are smaller by the factor norm / (norm + 1e-6), and it shrinks those whose norm is max_norm exactly.
    """
    norm = global_norm(gradients)
    if norm + epsilon <= max_norm:
        return gradients
    return {name: value * (max_norm / (norm + epsilon)) for name, value in gradients.items()}


def clip_by_value(gradients: Weights, max_value: float) -> Weights:
    """Every element limited to [-max_value, max_value]."""
    return {name: np.clip(value, -max_value, max_value) for name, value in gradients.items()}


@dataclass(frozen=True)
class Clip:
    """How a gradient is clipped before the update: by norm, by value or not at all."""

    norm: float | None = None
    value: float | None = None
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.norm is not None and self.value is not None:
            raise ValueError(f"clip_norm={self.norm!r} and clip_value={self.value!r} were given: give one of them")

    def __call__(self, gradients: Weights) -> Weights:
        if self.norm is not None:
            return clip_by_norm(gradients, self.norm, epsilon=self.epsilon)
        if self.value is not None:
            return clip_by_value(gradients, self.value)
        return gradients


NOT_CLIPPED = Clip()
