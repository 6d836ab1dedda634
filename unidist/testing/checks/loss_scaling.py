"""Contract 1, 3 and 4 under Keras' LossScaleOptimizer: one inf anywhere and all replicas skip; clipping acts on what is unscaled."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_apply
from unidist.testing.trial import Trial, truth

SCALE = 1024.0
TRIALS = {
    "clip-norm": Trial(optimizer="adam", rest="one", clip_norm=0.25),
    "clip-value-of-a-window": Trial(rest="uneven", steps=3, accumulation=2, clip_value=0.0625),
    "embedding": Trial("embedding", form="total"),
}


def scaling(bench: Bench, kind: str, model: Any, **settings: Any) -> Any:
    """A wrapped LossScaleOptimizer around golden's optimizer; its scale doubles every two updates."""
    with unidist.scope():
        inner = bench.optimizer(kind, model, wrapped=False, **settings)
        outer = bench.module.optimizers.LossScaleOptimizer(inner, initial_scale=SCALE, dynamic_growth_steps=2)
        return unidist.wrap_optimizer(outer, model)


def scale_of(bench: Bench, optimizer: Any) -> float:
    """The loss scale."""
    return float(bench.array(optimizer.dynamic_scale))


@check(1, "a LossScaleOptimizer trains like its inner optimizer, and its scale grows", cases=TRIALS, flavours="keras", few=("clip-norm",))
def loss_scale(bench: Bench, trial: Trial) -> None:
    model = bench.model(trial.network)
    optimizer = scaling(bench, trial.optimizer, model)
    step = unidist.make_train_step(
        model, optimizer, bench.loss(trial.network, trial.form), gradient_accumulation_steps=trial.accumulation, clip_norm=trial.clip_norm,
        clip_value=trial.clip_value,
    )  # fmt: skip
    losses, data = [], bench.data(trial.samples(bench.replicas), trial.batch(bench.replicas))
    for _ in range(trial.epochs):
        for batch in data:
            step(batch)
        losses.append(step.mean_loss())
    expected = truth(bench, trial)
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.close(np.array(losses), expected.epoch_losses(trial.epochs), "the epochs' mean_loss, without the scale")
    if trial.clip_norm is not None:
        bench.close(float(bench.array(step.last_norm)), expected.norms[-1], "the last norm, without the scale")
    compare.same(scale_of(bench, optimizer), SCALE * 2.0 ** (step.updates // 2), "the scale")
    bench.equal_everywhere(model)
    unidist.assert_replicas_equal(optimizer)


def _poisoned(bench: Bench) -> tuple[int, Any, Any, Any, Any]:
    """Toy W1 on two batches of n samples: (n, x, y, model, scaling optimizer); the target of the first batch's last sample is infinite."""
    n = 2 * bench.replicas
    x = np.arange(1.0, 2 * n + 1).reshape(-1, 1)
    y = 2 * x
    y[n - 1] = np.inf
    model = bench.model("linear", {"0/kernel": np.ones((1, 1))})
    optimizer = scaling(bench, "plain", model, rate=2.0**-9)
    return n, x, y, model, optimizer


@check(1, "one inf on one replica: all skip the update and halve the scale", flavours="keras", few=True,
       cases={"step": {}, "clipped": {"clip_value": 1.0}, "window": {"gradient_accumulation_steps": 2}, "fit": None})  # fmt: skip
def loss_scale_inf(bench: Bench, options: Any) -> None:
    n, x, y, model, optimizer = _poisoned(bench)
    if options is None:
        with unidist.scope():
            model.compile(optimizer, loss="mse")
        model.fit(x, y, batch_size=n, shuffle=False, verbose=0)
    else:
        step = unidist.make_train_step(model, optimizer, bench.loss("linear"), **options)
        for batch in unidist.wrap_data((x, y), global_batch_size=n):
            step(batch)
    held = "gradient_accumulation_steps" in (options or {})
    gradient = 0.0 if held else 2 * (x[n:] ** 2).mean()
    moved = min(gradient, (options or {}).get("clip_value", gradient)) * 2.0**-9
    bench.close(bench.weights(model)["0/kernel"], [[1.0 + moved]], "the weight")
    compare.same(scale_of(bench, optimizer), SCALE / 2, "the scale")
    compare.same(int(bench.array(optimizer.iterations)), 0 if held else 1, "the updates of the inner optimizer")
    bench.equal_everywhere(model)
    unidist.assert_replicas_equal(optimizer)


@check(1, "a LossScaleOptimizer in an own traced loop, reduced before or in apply", flavours="keras", needs=(exchanges_in_apply,),
       cases={"apply": False, "reduce-then-apply": True})  # fmt: skip
def loss_scale_own_loop(bench: Bench, reduce: bool) -> None:
    n, x, y, model, optimizer = _poisoned(bench)
    loss = bench.loss("linear", "mean")
    step = bench.own_step(model, optimizer, lambda outputs, targets: optimizer.scale_loss(loss(outputs, targets)), reduce=reduce)
    data = unidist.wrap_data((x, y), global_batch_size=n)
    for inputs, targets in data:
        step(inputs, targets, data.share)
    bench.close(bench.weights(model)["0/kernel"], [[1.0 + 2.0**-9 * 2 * (x[n:] ** 2).mean()]], "the weight")
    compare.same(scale_of(bench, optimizer), SCALE / 2, "the scale")
    bench.equal_everywhere(model)
