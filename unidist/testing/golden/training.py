"""Training on one device for the whole batch: what any number of replicas, stages and micro-batches must give.

Batches of one update form a window. A window's gradient is the sum of its batches' totals over the sum of their
weights, so k batches of b are one batch of k*b also when they are uneven.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from unidist.testing.golden.clipping import NOT_CLIPPED, Clip, global_norm
from unidist.testing.golden.data import Data
from unidist.testing.golden.layers import Array, Weights
from unidist.testing.golden.losses import Denominator, total_and_weight
from unidist.testing.golden.networks import Network, initial_weights
from unidist.testing.golden.optimizers import Optimizer


@dataclass(frozen=True, eq=False)
class Sums:
    """What samples contribute: the sum of their losses, their weight, the gradient of the sum. Contributions add up."""

    total: float
    weight: float
    gradients: Weights

    def __add__(self, other: "Sums") -> "Sums":
        gradients = {name: value + other.gradients[name] for name, value in self.gradients.items()}
        return Sums(self.total + other.total, self.weight + other.weight, gradients)

    def mean_gradients(self) -> Weights:
        """The gradient of total / weight."""
        if self.weight == 0.0:
            raise ValueError("the weights of a window sum to 0.0, so it has no mean loss: give some sample a weight")
        return {name: value / self.weight for name, value in self.gradients.items()}


@dataclass(frozen=True, eq=False)
class Result:
    """`weights` after the last update; totals and batch_weights (batches,) in order; `norms` (updates,), all float64.

    A batch's loss is that of the weights at the start of its window. Norms are of the gradient before it was clipped.
    """

    weights: Weights
    totals: Array
    batch_weights: Array
    norms: Array

    @property
    def losses(self) -> Array:
        """The mean loss of every batch (batches,); NaN where a batch's weights sum to 0."""
        with np.errstate(invalid="ignore"):
            return self.totals / self.batch_weights

    def epoch_losses(self, epochs: int = 1) -> Array:
        """The exact mean loss of each of `epochs` epochs (epochs,), as `step.mean_loss()` and Keras' `fit` tell it."""
        totals: Array = self.totals.reshape(epochs, -1).sum(axis=1)
        weights: Array = self.batch_weights.reshape(epochs, -1).sum(axis=1)
        return totals / weights


def compute_sums(network: Network, weights: Weights, data: Data, *, denominator: Denominator = "samples") -> Sums:
    """The contribution of all samples of `data` at `weights`; `sums.total / sums.weight` is their mean loss."""
    outputs = network.forward(weights, data.inputs)
    values = network.loss.values(outputs, data.targets)
    total, weight = total_and_weight(values, data.sample_weight, denominator)
    upstream = network.loss.gradient(outputs, data.targets)
    if data.sample_weight is not None:
        upstream = upstream * data.sample_weight[:, None]
    return Sums(total, weight, network.backward(weights, data.inputs, upstream))


def batches(data: Data, global_batch_size: int, *, drop_last: bool = False) -> list[Data]:
    """Consecutive batches in order; the last is smaller where n does not divide, or left out."""
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size is {global_batch_size!r}: it must be 1 or more")
    stop = len(data) - len(data) % global_batch_size if drop_last else len(data)
    return [data[start : start + global_batch_size] for start in range(0, stop, global_batch_size)]


def windows(epoch: Sequence[Data], accumulation: int) -> list[Sequence[Data]]:
    """Windows of `accumulation` batches; the last holds what is left."""
    if accumulation < 1:
        raise ValueError(f"accumulation is {accumulation!r}: it must be 1 or more")
    return [epoch[start : start + accumulation] for start in range(0, len(epoch), accumulation)]


def train_windows(
    network: Network,
    optimizer: Optimizer,
    all_windows: Iterable[Sequence[Data]],
    *,
    weights: Weights | None = None,
    clip: Clip = NOT_CLIPPED,
    denominator: Denominator = "samples",
) -> Result:
    """One update per window, whatever its batches' sizes and order; starts at `initial_weights` unless given others."""
    current = initial_weights(network.name) if weights is None else weights
    state = optimizer.initial_state(current)
    parts: list[Sums] = []
    norms: list[float] = []
    for window in all_windows:
        sums = [compute_sums(network, current, batch, denominator=denominator) for batch in window]
        gradients = reduce(add, sums).mean_gradients()
        norms.append(global_norm(gradients))
        current, state = optimizer.update(current, clip(gradients), state)
        parts += sums
    totals, batch_weights = np.array([part.total for part in parts]), np.array([part.weight for part in parts])
    return Result(current, totals, batch_weights, np.array(norms))


def train(
    network: Network,
    optimizer: Optimizer,
    *,
    data: Data,
    global_batch_size: int,
    epochs: int = 1,
    accumulation: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    clip_epsilon: float = 0.0,
    sample_weight: Array | None = None,
    denominator: Denominator = "samples",
    drop_last: bool = False,
    weights: Weights | None = None,
) -> Result:
    """Train on `data` in order, `epochs` times; a window cut by the end of an epoch is flushed, an update like others.

    sample_weight (n,) takes the place of the data's own; `denominator` says what weighted losses are divided by
    (`total_and_weight`). Gradients are clipped once per update, by the exact global norm (`clip_epsilon=1e-6` for what
    `torch.nn.utils.clip_grad_norm_` does) or by value. Raises ValueError for sizes below 1 or both kinds of clipping.

    For windows that go on over the end of an epoch (Keras' `fit`) or another order, call `train_windows`.
    """
    if sample_weight is not None:
        data = replace(data, sample_weight=sample_weight)
    epoch = windows(batches(data, global_batch_size, drop_last=drop_last), accumulation)
    clip = Clip(clip_norm, clip_value, clip_epsilon)
    return train_windows(network, optimizer, epoch * epochs, weights=weights, clip=clip, denominator=denominator)
