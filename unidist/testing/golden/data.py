"""Small fixed datasets in float64 for the networks of the truth, drawn from a seeded generator."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from unidist.testing.golden.layers import Array


@dataclass(frozen=True, eq=False)
class Data:
    """Samples along the first axis: inputs (n, ...), targets (n, ...), and weights (n,) or none."""

    inputs: Array
    targets: Array
    sample_weight: Array | None = None

    def __post_init__(self) -> None:
        expected = (len(self.inputs),)
        if self.sample_weight is not None and self.sample_weight.shape != expected:
            raise ValueError(f"sample_weight has shape {self.sample_weight.shape!r}: it must be {expected!r}")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Array | list[int]) -> "Data":
        """The samples of a slice or of an array of indices, in that order."""
        weight = None if self.sample_weight is None else self.sample_weight[rows]
        return Data(self.inputs[rows], self.targets[rows], weight)


def _linear(n: int, generator: np.random.Generator) -> Data:
    """Toy W1: x = 1..n, y = 2x, nothing drawn."""
    x = np.arange(1.0, n + 1.0)[:, None]
    return Data(x, 2.0 * x)


def _mlp(n: int, generator: np.random.Generator) -> Data:
    return Data(generator.standard_normal((n, 3)), generator.standard_normal((n, 2)))


def _classifier(n: int, generator: np.random.Generator) -> Data:
    return Data(generator.standard_normal((n, 4)), generator.integers(0, 3, n))


def _embedding(n: int, generator: np.random.Generator) -> Data:
    """Ids 0..5 of 7 rows: row 6 is never used; repeated ids occur within and between samples.

    On TensorFlow, Keras 3.15 squares the gradients of an id's occurrences one by one, where Adam and clipping by norm
    want the square of their sum; there the gradients must be made dense before `apply` to give the truth.
    """
    return Data(generator.integers(0, 6, (n, 3)), generator.standard_normal((n, 1)))


_MAKERS: dict[str, Callable[[int, np.random.Generator], Data]] = {
    "linear": _linear,
    "mlp": _mlp,
    "classifier": _classifier,
    "embedding": _embedding,
}


def dataset(name: str, n: int = 10, *, seed: int = 1) -> Data:
    """n samples for the network `name`, the same for the same n and seed; floats are float64, ids and classes int64."""
    return _MAKERS[name](n, np.random.default_rng(seed))


def sample_weights(n: int, *, seed: int = 2) -> Array:
    """Weights (n,), float64, between 0.25 and 2, the fourth 0 (a sample that must not count)."""
    weights = np.random.default_rng(seed).uniform(0.25, 2.0, n)
    weights[3:4] = 0.0
    return weights
