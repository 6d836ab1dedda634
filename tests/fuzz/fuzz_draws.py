"""A draw: one way of training a small network, drawn by hypothesis; and what one device makes of it, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from hypothesis import strategies as st

from unidist.testing import golden
from unidist.testing.bench import CLASS_WEIGHTS

CLASSES = len(CLASS_WEIGHTS)
LOOPS = {"torch": ("step", "own", "said", "weight"), "tensorflow": ("step", "traced")}


@dataclass(frozen=True)
class Draw:
    """What is trained, on what, and how.

    flavour: "native" or "keras". loop: "step" (make_train_step), "own" (plain backward, or `accumulate`), "said" and "weight"
    (unidist.backward), "traced" (reduce_gradients in a traced step), "fit". source: of the samples, "arrays", "dataset" or "stream".
    rows: of an embedding, 0 for dense inputs. widths: of hidden layers. classes: cross entropy, else mean squared error. biases: of all
    dense layers. frozen: number of a layer that is not trained. parts: samples by process when the data is split already, else empty.
    form: of the loss, as for Bench.loss. clip: ("norm" or "value", bound).
    """

    flavour: str
    loop: str
    source: str
    rows: int
    widths: tuple[int, ...]
    outputs: int
    classes: bool
    biases: bool
    frozen: int | None
    samples: int
    batch: int
    parts: tuple[int, ...]
    drop_last: bool
    shuffle: bool
    epochs: int
    accumulation: int
    optimizer: str
    rate: float
    clip: tuple[str, float] | None
    form: str
    weighted: bool
    seed: int

    @property
    def network(self) -> golden.Network:
        """The layers; the name is that of a network with the same loss."""
        layers: list[golden.Layer] = [golden.Embedding(self.rows, 2), golden.MeanOverPositions()] if self.rows else []
        width = 2 if self.rows else 3
        for hidden in self.widths:
            layers += [golden.Dense(width, hidden, use_bias=self.biases), golden.Tanh()]
            width = hidden
        layers.append(golden.Dense(width, self.outputs, use_bias=self.biases))
        return golden.Network("classifier" if self.classes else "mlp", tuple(layers), golden.CROSS_ENTROPY if self.classes else golden.MSE)

    def weights(self) -> golden.Weights:
        """The initial ones."""
        generator = np.random.default_rng((self.seed, 1))
        return {name: 0.5 * generator.standard_normal(shape) for name, shape in self.network.shapes().items()}

    def data(self) -> golden.Data:
        """All samples."""
        generator = np.random.default_rng((self.seed, 2))
        n = sum(self.parts) or self.samples
        inputs = generator.integers(0, self.rows, (n, 3)) if self.rows else generator.standard_normal((n, 3))
        targets = generator.integers(0, CLASSES, n) if self.classes else generator.standard_normal((n, self.outputs))
        return golden.Data(inputs, targets, golden.sample_weights(n) if self.weighted else None)

    def trained(self) -> list[str]:
        """Names of the weights that are trained."""
        return [name for name in self.network.shapes() if not name.startswith(f"{self.frozen}/")]

    def truth_optimizer(self, formula: str) -> golden.Optimizer:
        """golden's, with an epsilon that keeps Adam from making much of rounding."""
        made = golden.TorchSGD(self.rate) if self.optimizer == "plain" else golden.make_optimizer(formula, self.optimizer, self.rate)
        return replace(made, **self.settings())

    def settings(self) -> dict[str, float]:
        """Hyper-parameters in place of golden's."""
        return {"epsilon": 2.0**-10} if self.optimizer == "adam" else {}


@dataclass(frozen=True)
class Truth:
    """Of one device: weights at the end, mean loss of each epoch, norm of each update before clipping."""

    weights: golden.Weights
    losses: list[float]
    norms: list[float]


def truth(draw: Draw, formula: str, clip_epsilon: float, orders: Sequence[Any], replicas: int) -> Truth:
    """The same on one device; orders: the samples of each epoch as indices, where the data is whole."""
    network, data, current = draw.network, draw.data(), draw.weights()
    trained, optimizer = draw.trained(), draw.truth_optimizer(formula)
    state = optimizer.initial_state({name: current[name] for name in trained})
    bounds = dict([draw.clip]) if draw.clip else {}
    clip = golden.Clip(bounds.get("norm"), bounds.get("value"), clip_epsilon)
    by_class = draw.form == "total" and draw.classes
    losses, norms = [], []
    for epoch in range(draw.epochs):
        sums = []
        for window in golden.windows([data[rows] for rows in _batches(draw, orders, epoch, replicas)], draw.accumulation):
            batches = [_by_class(batch) if by_class else batch for batch in window]
            own = [golden.compute_sums(network, current, batch, denominator="weights" if by_class else "samples") for batch in batches]
            gradients = {name: value for name, value in reduce(add, own).mean_gradients().items() if name in trained}
            norms.append(golden.global_norm(gradients))
            updated, state = optimizer.update({name: current[name] for name in trained}, clip(gradients), state)
            current = {**current, **updated}
            sums += own
        weight = sum(part.weight for part in sums)
        losses.append(sum(part.total for part in sums) / weight if weight else float("nan"))
    return Truth(current, losses, norms)


def _by_class(batch: golden.Data) -> golden.Data:
    return replace(batch, sample_weight=golden.class_sample_weights(batch.targets, dict(enumerate(CLASS_WEIGHTS))))


def _batches(draw: Draw, orders: Sequence[Any], epoch: int, replicas: int) -> list[Any]:
    """The indices of each global batch of an epoch."""
    if not draw.parts:
        order = orders[epoch]
        stop = len(order) - len(order) % draw.batch if draw.drop_last else len(order)
        return [order[begin : begin + draw.batch] for begin in range(0, stop, draw.batch)]
    sizes = [draw.batch // replicas + (rank < draw.batch % replicas) for rank in range(replicas)]
    begins = np.cumsum([0, *draw.parts])
    counts = [n // b if draw.drop_last else -(-n // b) for n, b in zip(draw.parts, sizes)]
    steps = min(counts) if draw.drop_last else max(counts)
    return [np.concatenate([_part(begins[r], draw.parts[r], sizes[r], step) for r in range(replicas)]) for step in range(steps)]


def _part(begin: int, length: int, size: int, step: int) -> Any:
    return np.arange(begin + min(step * size, length), begin + min((step + 1) * size, length))


@st.composite
def draws(choose: Any, framework: str, replicas: int, processes: int) -> Draw:
    """Draws that mean something on this number of replicas."""
    pick = lambda *values: choose(st.sampled_from(values))  # noqa: E731
    number = lambda low, high: choose(st.integers(low, high))  # noqa: E731
    flavour = pick("native", "native", "keras") if framework == "torch" else "keras"
    loop = pick(
        *(LOOPS[framework] if flavour == "native" or framework == "tensorflow" else ("step",)), *(["fit"] if flavour == "keras" else [])
    )
    classes = choose(st.booleans())
    batch, samples = number(1, 3 * replicas + 2), number(1, 6 * replicas + 3)
    parts: tuple[int, ...] = ()
    if loop in ("step", "own", "said", "weight") and processes > 1 and batch >= replicas and pick(False, False, True):
        parts = tuple(number(1, 5) for _ in range(processes))
    plain = loop in ("traced", "fit")
    if loop == "fit":  # which refuses a last batch that is smaller than the replicas
        batch = max(batch, replicas)
        samples = max(samples, replicas)
        samples += (replicas - samples % batch) if 0 < samples % batch < replicas else 0
    clip = None if plain else pick(None, None, ("norm", 0.25), ("norm", 8.0), ("value", 0.0625))
    form = pick("mean", "samples", "total") if loop in ("step", "said") else "object" if loop == "fit" else "mean"
    rows = pick(0, 0, 5)
    widths = tuple(number(1, 4) for _ in range(number(0, 2)))
    layers = bool(rows) + len(widths) + 1
    source = "arrays" if plain else pick("arrays", "arrays", "dataset", "stream")
    return Draw(
        flavour=flavour, loop=loop, source=source, rows=rows, widths=widths, outputs=CLASSES if classes else number(1, 3), classes=classes,
        biases=choose(st.booleans()), frozen=number(0, layers - 1) if layers > 1 and pick(False, False, True) else None, samples=samples,
        batch=batch, parts=parts, drop_last=not plain and choose(st.booleans()),
        shuffle=not plain and not parts and source != "stream" and choose(st.booleans()),
        epochs=number(1, 2), accumulation=1 if plain else number(1, 3), optimizer=pick("plain", "sgd", "adam"), rate=pick(0.125, 0.0625),
        clip=clip, form=form, weighted=form in ("samples", "object") and loop != "said" and choose(st.booleans()), seed=number(0, 999),
    )  # fmt: skip
