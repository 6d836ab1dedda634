"""A trial: one way of training a small network through unidist, and the same in NumPy on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import unidist
from unidist.testing import golden
from unidist.testing.bench import CLASS_WEIGHTS, Bench


@dataclass(frozen=True)
class Trial:
    """What is trained, and how.

    rest: samples after the whole batches, "none", "uneven" (shares differ) or "one" (fewer than replicas); steps: whole batches an epoch.
    form: of the loss, as for Bench.loss. weighted: the batches have sample weights. inputs: "tensor", "dict" or "tuple".
    """

    network: str = "mlp"
    optimizer: str = "sgd"
    rest: str = "uneven"
    steps: int = 2
    epochs: int = 2
    accumulation: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    form: str = "mean"
    weighted: bool = False
    inputs: str = "tensor"

    def batch(self, replicas: int) -> int:
        """Samples of a whole batch."""
        return max(4, 2 * replicas)

    def samples(self, replicas: int) -> golden.Data:
        """The data of an epoch."""
        rest = {"none": 0, "uneven": replicas + 1 if replicas > 1 else 3, "one": 1}[self.rest]
        n = self.steps * self.batch(replicas) + rest
        data = golden.dataset(self.network, n)
        return golden.Data(data.inputs, data.targets, golden.sample_weights(n)) if self.weighted else data


def truth(bench: Bench, trial: Trial) -> golden.Result:
    """The same on one device, in NumPy."""
    data = trial.samples(bench.replicas)
    weight, denominator = data.sample_weight, "samples"
    if trial.form == "total" and trial.network == "classifier":
        weight, denominator = golden.class_sample_weights(data.targets, dict(enumerate(CLASS_WEIGHTS))), "weights"
    return golden.train(
        golden.NETWORKS[trial.network], golden.make_optimizer(bench.formula, trial.optimizer), data=data,
        global_batch_size=trial.batch(bench.replicas), epochs=trial.epochs, accumulation=trial.accumulation, clip_norm=trial.clip_norm,
        clip_value=trial.clip_value, clip_epsilon=bench.clip_epsilon, sample_weight=weight, denominator=denominator,  # type: ignore[arg-type]
    )  # fmt: skip


def setup(bench: Bench, trial: Trial, **options: Any) -> tuple[Any, Any, unidist.Data]:
    """The wrapped model, optimizer and data of a trial; options: of wrap_model."""
    model = bench.model(trial.network, named_inputs=trial.inputs == "dict", **options)
    optimizer = bench.optimizer(trial.optimizer, model)
    samples = trial.samples(bench.replicas)
    inputs = {"tensor": samples.inputs, "dict": {"features": samples.inputs}, "tuple": (samples.inputs,)}[trial.inputs]
    parts = (inputs, samples.targets, *([samples.sample_weight] if trial.weighted else []))
    return model, optimizer, unidist.wrap_data(parts, global_batch_size=trial.batch(bench.replicas))


def verify(bench: Bench, trial: Trial, **options: Any) -> None:
    """Train with make_train_step; weights, epoch losses, norms and the number of updates are those of one device.

    options: more of make_train_step's, which must not change the result.
    """
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(
        model, optimizer, bench.loss(trial.network, trial.form), gradient_accumulation_steps=trial.accumulation,
        clip_norm=trial.clip_norm, clip_value=trial.clip_value, **options,
    )  # fmt: skip
    losses, norms = [], []
    for _ in range(trial.epochs):
        for batch in data:
            updates = step.updates
            step(batch)
            if step.updates > updates and trial.clip_norm is not None:
                norms.append(float(bench.array(step.last_norm)))
        losses.append(step.mean_loss())
    expected = truth(bench, trial)
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.close(np.array(losses), expected.epoch_losses(trial.epochs), "the epochs' mean_loss")
    bench.close(step.updates, len(expected.norms), "step.updates")
    if norms:
        bench.close(np.array(norms), expected.norms, "the norms before clipping")
    bench.equal_everywhere(model)
