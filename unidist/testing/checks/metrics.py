"""Contract 11: metrics count samples; what is not a mean is computed from merged state."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check

RESTS = {"10-by-4": (10, 4), "9-by-4": (9, 4), "8-by-4": (8, 4), "1-by-4": (1, 4)}


@check(11, "evaluate: the exact mean of the loss and of functions", cases=RESTS, few=("9-by-4",),
       flavours={"native": RESTS, "keras": ("9-by-4",)})  # fmt: skip
def evaluate(bench: Bench, case: tuple[int, int]) -> None:
    n, batch = case
    samples, network = golden.dataset("mlp", n), golden.NETWORKS["mlp"]
    model = bench.model("mlp")
    outputs = network.forward(golden.initial_weights("mlp"), samples.inputs)
    values, ops = network.loss.values(outputs, samples.targets), bench.ops()
    metrics = {
        "largest": lambda found, targets: ops.amax(found, 1),
        "mean": lambda found, targets: ops.mean(found - targets),
    }
    for form in ("object", "mean", "samples"):
        found = unidist.evaluate(model, bench.data(samples, batch), bench.loss("mlp", form), metrics)
        bench.close(found["loss"], values.mean(), f"the loss, given as {form}")
        bench.close(found["largest"], outputs.max(1).mean(), "a metric with one value per sample")
        bench.close(found["mean"], (outputs - samples.targets).mean(), "a metric that is a scalar mean")
    bench.close(bench.weights(model), golden.initial_weights("mlp"), "weight")


@check(11, "evaluate counts (total, weight) losses and sample weights as training does", flavours="native")
def weighted_evaluation(bench: Bench) -> None:
    samples = golden.dataset("classifier", 9)
    model, network = bench.model("classifier"), golden.NETWORKS["classifier"]
    weights = golden.class_sample_weights(samples.targets, {0: 0.5, 1: 1.0, 2: 2.0})
    weighted = golden.Data(samples.inputs, samples.targets, weights)
    sums = golden.compute_sums(network, golden.initial_weights("classifier"), weighted, denominator="weights")
    found = unidist.evaluate(model, bench.data(samples, 4), bench.loss("classifier", "total"))
    bench.close(found["loss"], sums.total / sums.weight, "the loss by weight")
    by_samples = golden.compute_sums(network, golden.initial_weights("classifier"), weighted)
    found = unidist.evaluate(model, bench.data(weighted, 4), bench.loss("classifier", "samples"))
    bench.close(found["loss"], by_samples.total / by_samples.weight, "the loss with sample weights")


@check(11, "metric objects of Keras are computed from merged state, AUC too", flavours="keras", few=True)
def merged(bench: Bench) -> None:
    """Five samples with predictions [.1, .4, .35, .8, .9] of the classes [0, 0, 1, 1, 1]: AUC 5/6, two true positives."""
    keras = bench.module
    scores, classes = np.array([[0.1], [0.4], [0.35], [0.8], [0.9]]), np.array([[0.0], [0.0], [1.0], [1.0], [1.0]])
    model = bench.model("linear")
    metrics = {
        "auc": keras.metrics.AUC(), "tp": keras.metrics.TruePositives(), "precision": keras.metrics.Precision(thresholds=0.375),
        "mae": keras.metrics.MeanAbsoluteError(),
    }  # fmt: skip
    for _ in range(2):
        found = unidist.evaluate(model, unidist.wrap_data((scores, classes), global_batch_size=4), None, metrics)
        bench.close(found["auc"], 5 / 6, "AUC", tolerance=1e-5)
        bench.close(found["tp"], 2.0, "the true positives")
        bench.close(found["precision"], 2 / 3, "precision", tolerance=1e-6)
        bench.close(found["mae"], np.abs(scores - classes).mean(), "the mean absolute error", tolerance=1e-6)


@check(11, "predict gives exactly n outputs, in order, on all ranks or one", cases=RESTS, few=("9-by-4",),
       flavours={"native": RESTS, "keras": ("9-by-4", "1-by-4")})  # fmt: skip
def predict(bench: Bench, case: tuple[int, int]) -> None:
    n, batch = case
    inputs = golden.dataset("mlp", n).inputs
    model = bench.model("mlp")
    expected = golden.NETWORKS["mlp"].forward(golden.initial_weights("mlp"), inputs)
    found = unidist.predict(model, unidist.wrap_data(inputs, global_batch_size=batch))
    compare.true(isinstance(found, np.ndarray), "the outputs are a NumPy array")
    bench.close(found, expected, "the outputs")
    bench.close(unidist.predict(model, bench.data(golden.dataset("mlp", n), batch)), expected, "the outputs for (inputs, targets)")
    on_one = unidist.predict(model, unidist.wrap_data(inputs, global_batch_size=batch), root=bench.size - 1)
    compare.same(on_one is None, bench.rank != bench.size - 1, "whether this rank gets nothing")
    with compare.raises(ValueError, "shuffle"):
        unidist.predict(model, unidist.wrap_data(inputs, global_batch_size=batch, shuffle=True))
    with compare.raises(TypeError, "wrap_data"):
        unidist.predict(model, inputs)  # type: ignore[arg-type]


@check(11, "predict keeps the form of the outputs", flavours="native")
def predicted_nest(bench: Bench) -> None:
    torch = bench.module

    class Heads(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return {"double": 2 * x, "pair": (x, x + 1)}

    inputs = np.arange(5.0)[:, None]
    found = unidist.predict(unidist.wrap_model(Heads()), unidist.wrap_data(inputs, global_batch_size=4))
    compare.same(list(found), ["double", "pair"], "the keys")
    compare.same(found["double"], 2 * inputs, "the first head")
    compare.same(found["pair"][1], inputs + 1, "the second head")


@check(11, "predict of already split data gives every process's samples", flavours="native")
def predicted_shards(bench: Bench) -> None:
    """Step after step, rank after rank."""
    mine = golden.dataset("mlp", 3 if bench.rank == 0 else 2).inputs
    model = bench.model("mlp")
    found = unidist.predict(model, unidist.wrap_data(mine, per_replica_batch_size=2, already_sharded=True))
    steps = [[rank, begin] for begin in (0, 2) for rank in range(bench.size)]
    parts = [golden.dataset("mlp", 3 if rank == 0 else 2).inputs[begin : begin + 2] for rank, begin in steps]
    expected = golden.NETWORKS["mlp"].forward(golden.initial_weights("mlp"), np.concatenate(parts))
    bench.close(found, expected, "the outputs")


@check(11, "Mean: of scalars over shares, of values per sample, of weights", flavours="once", few=True)
def mean(bench: Bench) -> None:
    samples = np.arange(9.0)
    data = unidist.wrap_data(samples, global_batch_size=4)
    scalars, values = unidist.Mean(), unidist.Mean()
    for batch in data:
        rows = bench.array(batch)
        scalars.update(bench.tensor(rows.mean()))
        values.update(batch)
    bench.close(scalars.compute(), samples.mean(), "the mean of scalars")
    bench.close(values.compute(), samples.mean(), "the mean of values")
    weighted = unidist.Mean()
    weighted.update(1.0 + bench.rank, weight=1.0 + bench.rank)
    ranks = np.arange(1.0, bench.size + 1)
    bench.close(weighted.compute(), float((ranks**2).sum() / ranks.sum()), "the mean with weights")
    weighted.reset()
    compare.true(np.isnan(weighted.compute()), "nothing counted gives NaN")
    for batch in data:
        weighted.update(batch, share=data.share)
    bench.close(weighted.compute(), samples.mean(), "the mean with shares")


@check(11, "gather_predictions gives the whole batch on every rank, without borrowed rows", flavours="once", few=True)
def gathered(bench: Bench) -> None:
    for number, batch in enumerate(unidist.wrap_data(np.arange(9.0), global_batch_size=4)):
        found = bench.array(unidist.gather_predictions(batch))
        compare.same(found.tolist(), [float(i) for i in range(4 * number, min(4 * number + 4, 9))], f"batch {number}")


@check(11, "evaluation leaves the mode of the model", flavours="native")
def mode(bench: Bench) -> None:
    torch = bench.module
    model = unidist.wrap_model(torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(1, 1)).double())
    inputs = np.ones((4, 1))
    first, second = (unidist.predict(model, unidist.wrap_data(inputs, global_batch_size=4)) for _ in range(2))
    compare.same(first, second, "two predictions of a model with dropout")
    compare.true(model.training and model[0].training, "the model is in training mode as before")
