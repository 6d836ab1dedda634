"""Contract 1 and 11 in Keras' own fit, evaluate and predict, and in own loops where gradients are exchanged in apply."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.testing import compare, golden
from unidist.testing.bench import CLASS_WEIGHTS, Bench
from unidist.testing.table import check, exchanges_in_apply, several_replicas
from unidist.testing.trial import Trial, setup, truth

FITS = {
    "even": (Trial(rest="none"), {}),
    "uneven-sample-weights": (Trial(weighted=True), {}),
    "uneven-class-weights": (Trial("classifier", "adam"), {"class_weight": dict(enumerate(CLASS_WEIGHTS))}),
}


@check(1, "fit on the whole data trains like one device, and tells its loss", cases=FITS, flavours="keras", few=("uneven-sample-weights",))
def fit(bench: Bench, case: Any) -> None:
    trial, options = case
    samples = trial.samples(bench.replicas)
    model = _compiled(bench, trial)
    weights = {} if samples.sample_weight is None else {"sample_weight": samples.sample_weight}
    history = model.fit(
        samples.inputs,
        samples.targets,
        batch_size=trial.batch(bench.replicas),
        epochs=trial.epochs,
        shuffle=False,
        verbose=0,
        **weights,
        **options,
    )
    by_class = golden.class_sample_weights(samples.targets, options["class_weight"]) if options else samples.sample_weight
    expected = golden.train(
        golden.NETWORKS[trial.network], golden.make_optimizer("keras", trial.optimizer), data=samples, epochs=trial.epochs,
        global_batch_size=trial.batch(bench.replicas), sample_weight=by_class,
    )  # fmt: skip
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.close(np.array(history.history["loss"]), expected.epoch_losses(trial.epochs), "the epochs' losses")
    bench.equal_everywhere(model)


@check(1, "a masked model: the loss divides by what is not masked, over the whole batch", flavours="keras", few=True,
       cases={"fit": True, "step": False})  # fmt: skip
def masked(bench: Bench, in_fit: bool) -> None:
    """Toy W1 over two time steps, of which every other sequence has one: w = 1 + 2 * rate * mean(x^2 over the steps that are there)."""
    rate, n = 2.0**-7, bench.replicas + 1
    x = np.arange(1.0, 2 * n + 1).reshape(n, 2, 1)
    x[1::2, 1] = 0.0
    with unidist.scope():
        model = unidist.wrap_model(bench.masked(2))
        optimizer = bench.optimizer("sgd", model, rate=rate)
    if in_fit:
        with unidist.scope():
            model.compile(optimizer, loss="mse")
        loss = model.fit(x, 2 * x, batch_size=n, shuffle=False, verbose=0).history["loss"][0]
    else:
        step = unidist.make_train_step(model, optimizer, bench.loss("linear", "object"))
        for batch in unidist.wrap_data((x, 2 * x), global_batch_size=n):
            step(batch)
        loss = step.mean_loss()
    there = (x[x != 0] ** 2).mean()
    bench.close(unidist.get_weights(model).popitem()[1], np.array([[1 + 2 * rate * there]]), "the weight")
    bench.close(loss, there, "the loss")
    bench.equal_everywhere(model)


def _compiled(bench: Bench, trial: Trial) -> Any:
    model = bench.model(trial.network)
    with unidist.scope():
        model.compile(
            bench.optimizer(trial.optimizer, model), bench.loss(trial.network, "object"), metrics=["mae"] if trial.network == "mlp" else []
        )
    return model


@check(11, "Keras' evaluate and predict over the whole data: exact means, exactly n rows, in order", flavours="keras", few=True)
def evaluate_and_predict(bench: Bench) -> None:
    trial = Trial(rest="one")
    samples, model = trial.samples(bench.replicas), _compiled(bench, trial)
    outputs = golden.NETWORKS["mlp"].forward(golden.initial_weights("mlp"), samples.inputs)
    batch = trial.batch(bench.replicas)
    found = model.evaluate(samples.inputs, samples.targets, batch_size=batch, verbose=0, return_dict=True)
    bench.close(found["loss"], golden.MSE.values(outputs, samples.targets).mean(), "the loss")
    bench.close(found["mae"], np.abs(outputs - samples.targets).mean(), "the mean absolute error")
    bench.close(model.predict(samples.inputs, batch_size=batch, verbose=0), outputs, "the outputs")


@check(1, "an own loop, traced, with reduce_gradients and the wrapped optimizer's apply", flavours="keras", needs=(exchanges_in_apply,),
       cases={"apply": "apply", "reduce-then-apply": "reduce"}, few=("reduce-then-apply",))  # fmt: skip
def traced_loop(bench: Bench, how: str) -> None:
    """Batches are even where apply alone counts them, uneven where the rows are said."""
    trial = Trial(rest="none" if how == "apply" else "uneven", epochs=1)
    model, optimizer, data = setup(bench, trial)
    step = bench.own_step(model, optimizer, bench.loss("mlp", "mean"), reduce=how == "reduce")
    for x, y in data:
        step(x, y, data.share)
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")
    bench.equal_everywhere(model)


@check(
    1, "reduce_gradients gives the mean; a variable used nowhere keeps None", flavours="keras", needs=(exchanges_in_apply, several_replicas)
)
def reduced(bench: Bench) -> None:
    values = bench.on_replicas(lambda index: [bench.ops().cast(index, "float64") + 1.0, None], reduce=True)
    expected = np.mean([1.0 + index for index in range(bench.replicas)])
    for found, unused in values:
        bench.close(bench.array(found), expected, "the reduced gradient")
        compare.true(unused is None, "what has no gradient anywhere stays None")
