"""Contract 1: training on any number of replicas gives the weights and losses of one device."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import unidist
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, engine_of_its_own, one_replica_each, several_processes
from unidist.testing.trial import Trial, setup, truth, verify

_RESTS = ("none", "uneven", "one")
TRIALS = {
    "linear-sgd-uneven": Trial("linear", rest="uneven", optimizer="sgd"),
    **{f"{n}-{o}-{r}": Trial(n, o, r) for n, o, r in product(("mlp", "classifier", "embedding"), ("sgd", "adam"), _RESTS)},
}
FORMS = {
    "one-value-per-sample": Trial(form="samples", rest="one"),
    "total-and-samples": Trial(form="total"),
    "total-and-class-weights": Trial("classifier", form="total", rest="uneven"),
    "total-and-class-weights-even": Trial("classifier", form="total", rest="none"),
    "total-and-class-weights-empty": Trial("classifier", "adam", form="total", rest="one"),
    "sample-weights": Trial(form="samples", weighted=True),
    "sample-weights-empty": Trial("classifier", "adam", form="samples", weighted=True, rest="one"),
    "object": Trial(form="object"),
    "object-of-classes": Trial("classifier", form="object", rest="one"),
}
KERAS_FORMS = {
    "one-value-per-sample": Trial(form="samples", rest="one"),
    "total-and-class-weights": Trial("classifier", form="total", rest="uneven"),
    "total-and-class-weights-empty": Trial("classifier", form="total", rest="one"),
    "object-and-sample-weights": Trial(form="object", weighted=True),
}


@check(
    1, "steps train like one device", cases=TRIALS, few=("mlp-sgd-uneven", "mlp-adam-one", "classifier-sgd-none"),
    flavours={"native": TRIALS, "keras": ("linear-sgd-uneven", "mlp-adam-uneven", "classifier-sgd-one", "embedding-sgd-uneven")},
)  # fmt: skip
def steps(bench: Bench, trial: Trial) -> None:
    verify(bench, trial)


@check(1, "every form of loss counts as on one device", cases=FORMS, flavours="native", few=("total-and-class-weights", "sample-weights"))
def loss(bench: Bench, trial: Trial) -> None:
    verify(bench, trial)


@check(1, "every form of loss counts as on one device", cases=KERAS_FORMS, flavours="keras", few=("total-and-class-weights",))
def loss_form(bench: Bench, trial: Trial) -> None:
    verify(bench, trial)


@check(1, "inputs as a dict and as a tuple", cases={"dict": Trial(inputs="dict", steps=1), "tuple": Trial(inputs="tuple", steps=1)},
       flavours={"native": ("dict", "tuple"), "keras": ("dict",)})  # fmt: skip
def inputs(bench: Bench, trial: Trial) -> None:
    verify(bench, trial)


@check(1, "compute_loss gets the model and the batch as it is, here a dict")
def compute_loss(bench: Bench) -> None:
    trial = Trial(rest="uneven", steps=1, epochs=1)
    model = bench.model(trial.network)
    optimizer = bench.optimizer(trial.optimizer, model)
    samples = trial.samples(bench.replicas)
    data = unidist.wrap_data({"x": samples.inputs, "y": samples.targets}, global_batch_size=trial.batch(bench.replicas))
    values = bench.loss(trial.network, "samples")
    step = unidist.make_train_step(model, optimizer, compute_loss=lambda m, batch: values(m(batch["x"]), batch["y"]))
    for batch in data:
        step(batch)
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")
    bench.equal_everywhere(model)


@check(1, "W1 on shares {1,2} and {3} gives 1.093333, not the 1.115 of a mean of means", few=True)
def w1(bench: Bench) -> None:
    model = bench.model("linear")
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.01), bench.loss("linear", "mean"))
    for batch in bench.data(golden.dataset("linear", 3), 3):
        step(batch)
    bench.close(bench.weights(model)["0/kernel"], np.array([[1 + 0.02 * 14 / 3]]), "the weight", tolerance=max(bench.tolerance, 1e-8))


@check(1, "step(batch) is the mean loss of this process's share, and 0 for an empty one")
def returned_loss(bench: Bench) -> None:
    trial = Trial(rest="one", steps=1, epochs=1)
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, bench.loss(trial.network, "mean"))
    weights, samples, position = golden.initial_weights(trial.network), trial.samples(bench.replicas), 0
    for number, batch in enumerate(data):
        found = step(batch)
        compare.true(bench.is_tensor(found) and np.ndim(bench.array(found)) == 0, "step returns a 0-d tensor of the framework")
        share = data.share
        assert share is not None
        begin = position + sum(share.sizes[: share.first])
        position += share.total
        if share.size == 0:
            bench.close(bench.array(found), 0.0, "the loss of an empty share")
        elif number == 0:
            sums = golden.compute_sums(golden.NETWORKS[trial.network], weights, samples[begin : begin + share.size])
            bench.close(bench.array(found), sums.total / sums.weight, "the loss of the share")
    compare.same(position, len(samples), "the samples counted by the shares")
    compare.true(np.isfinite(step.mean_loss()), "mean_loss is a number")
    compare.true(np.isnan(step.mean_loss()), "mean_loss without a step since is NaN")


@check(1, "a borrowed sample whose loss is not a number changes nothing", few=True)
def borrowed_nan(bench: Bench) -> None:
    """The sample x = 1 has a loss and gradient at weight 1, but neither later, when an empty share borrows it."""
    ops, trial = bench.ops(), Trial("linear", "sgd", "one", steps=1, epochs=1)

    def values(outputs: Any, targets: Any) -> Any:
        first = targets == 2.0
        poison = ops.sqrt(ops.where(first, 1.5 - outputs, ops.ones_like(outputs)))
        return ops.mean(ops.square(outputs - targets) + 0.0 * poison, 1)

    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, values)
    for batch in data:
        step(batch)
    batch = trial.batch(bench.replicas)
    first_batch, formula = trial.samples(bench.replicas)[:batch], golden.make_optimizer(bench.formula, "sgd")
    after_one = golden.train(golden.NETWORKS["linear"], formula, data=first_batch, global_batch_size=batch)
    compare.true(after_one.weights["0/kernel"][0, 0] > 1.5, "the borrowed sample's loss is NaN in the second step")
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")
    compare.true(np.isfinite(step.mean_loss()), "mean_loss is a number")


@check(1, "batches that did not come from wrap_data count as equal shares", needs=(one_replica_each,))
def foreign_batches(bench: Bench) -> None:
    whole = golden.dataset("mlp", 4 * bench.size)
    mine = whole[4 * bench.rank : 4 * bench.rank + 4]
    model = bench.model("mlp")
    step = unidist.make_train_step(model, bench.optimizer("sgd", model), bench.loss("mlp", "mean"))
    for _ in range(2):
        step((bench.tensor(mine.inputs), bench.tensor(mine.targets)))
    expected = golden.train(
        golden.NETWORKS["mlp"], golden.make_optimizer(bench.formula, "sgd"), data=whole, global_batch_size=len(whole), epochs=2
    )
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.close(step.mean_loss(), expected.losses.mean(), "mean_loss")
    bench.equal_everywhere(model)


@check(1, "a step sends its gradients and nothing else, a total and weight one number more", needs=(several_processes, engine_of_its_own),
       few=("mean",), cases={"mean": "mean", "total": "total"})  # fmt: skip
def sent(bench: Bench, form: str) -> None:
    """Counted from the second epoch on, with an uneven last batch; what an engine sends in the backward pass itself is not seen here."""
    trial = Trial(rest="uneven", form=form)
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", form))
    for batch in data:
        step(batch)
    with bench.counting() as counts:
        for batch in data:
            step(batch)
        counted = dict(counts)
    steps = len(data)
    compare.same(counted["asked"], 0, "requests to the control plane while stepping")
    if "exchanged" in counted:
        gradients = 1 if bench.flavour == "keras" else 0  # a torch engine sends in backward
        compare.same(counted["exchanged"], steps * (gradients + (form == "total")), "exchanges")
