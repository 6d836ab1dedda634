"""Contract 1 and 2: half precision in the forward pass, and scaled losses, on which all ranks agree."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.errors import UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check
from unidist.testing.trial import Trial, setup, truth


def _scaler(bench: Bench, scale: float = 1024.0) -> Any:
    return bench.module.amp.GradScaler(bench.backend.device.type, init_scale=scale)


@check(1, "precision: the forward pass in half precision, weights and updates in float32", flavours="native",
       cases={"bf16": ("bf16", 2.0**-7), "fp16": ("fp16", 2.0**-10)})  # fmt: skip
def precision(bench: Bench, case: tuple[str, float]) -> None:
    name, unit = case
    torch, trial = bench.module, Trial(rest="uneven")
    model = bench.model("mlp", wrapped=False).float()
    unidist.wrap_model(model)
    optimizer = bench.optimizer("sgd", model)
    seen = set()

    def loss(outputs: Any, targets: Any) -> Any:
        seen.add(outputs.dtype)
        return ((outputs - targets) ** 2).mean(1)

    step = unidist.make_train_step(
        model, optimizer, loss, precision=name, check_every=1, scaler=_scaler(bench, 64.0) if name == "fp16" else None
    )
    samples = trial.samples(bench.replicas)
    data = (samples.inputs.astype(np.float32), samples.targets.astype(np.float32))
    for batch in unidist.wrap_data(data, global_batch_size=trial.batch(bench.replicas)):
        step(batch)
    compare.same(seen, {torch.bfloat16 if name == "bf16" else torch.float16}, "the dtypes of the outputs")
    compare.same({p.dtype for p in model.parameters()}, {torch.float32}, "the dtypes of the weights")
    expected = truth(bench, Trial(rest="uneven", epochs=1))
    distances = [np.abs(bench.weights(model)[key] - value).max() for key, value in expected.weights.items()]
    compare.true(1e-7 < max(distances) < 8 * unit, f"the weights differ from those of float64 by rounding, not by {max(distances):.3g}")
    bench.close(step.mean_loss(), expected.epoch_losses()[0], "the mean loss", tolerance=8 * unit)


SCALED = {
    "uneven": Trial(), "windows": Trial(accumulation=2), "clipped": Trial(clip_norm=0.25),
    "total": Trial("classifier", "adam", form="total", accumulation=2),
}  # fmt: skip


@check(1, "a scaler of losses changes nothing where all is finite", flavours="native", cases=SCALED)
def scaled(bench: Bench, trial: Trial) -> None:
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(
        model, optimizer, bench.loss(trial.network, trial.form), gradient_accumulation_steps=trial.accumulation, clip_norm=trial.clip_norm,
        scaler=_scaler(bench),
    )  # fmt: skip
    norms = []
    for _ in range(trial.epochs):
        for batch in data:
            before = step.updates
            step(batch)
            if trial.clip_norm is not None and step.updates > before:
                norms.append(float(bench.array(step.last_norm)))
    expected = truth(bench, trial)
    bench.close(bench.weights(model), expected.weights, "weight")
    if norms:
        bench.close(np.array(norms), expected.norms, "the norms before clipping")


@check(1, "one infinite gradient anywhere: all ranks skip, with the same scale after it; the scheduler waits", flavours="native")
def infinite(bench: Bench) -> None:
    torch, n = bench.module, 2 * bench.replicas
    model = bench.model("linear")
    optimizer = bench.optimizer("sgd", model, momentum=0.0, rate=2.0**-7)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = _scaler(bench, 8.0)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"), scaler=scaler, scheduler=scheduler)
    x = np.ones((3 * n, 1))
    y = np.full((3 * n, 1), 2.0)
    y[2 * n - 1] = np.inf  # of the last replica, in the second batch
    scales, weights, rates = [], [], []
    for batch in unidist.wrap_data((x, y), global_batch_size=n):
        step(batch)
        scales.append(scaler.get_scale())
        weights.append(float(bench.array(next(model.parameters()))[0, 0]))
        rates.append(bench.learning_rate(optimizer))
    compare.same(bench.everywhere(scales), [[8.0, 4.0, 4.0]] * bench.size, "the scales")
    compare.same(weights[1], weights[0], "the weight after the skipped update")
    bench.close(weights[2], weights[1] + rates[1] * 2 * (2.0 - weights[1]), "the weight after the third")
    compare.same(rates, [2.0**-8, 2.0**-8, 2.0**-9], "the rates")
    compare.same(step.updates, 2, "step.updates")
    bench.equal_everywhere(model)


@check(2, "a scaler's scale becomes rank 0's", flavours="native")
def same_scale(bench: Bench) -> None:
    model = bench.model("linear")
    optimizer, scaler = bench.optimizer("sgd", model), _scaler(bench, 4.0 if bench.rank == 0 else 4096.0)
    unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"), scaler=scaler)
    compare.same(scaler.get_scale(), 4.0, "the scale")
    made = unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"), precision="fp16")
    compare.true(isinstance(made.scaler, bench.module.amp.GradScaler), "fp16 has a scaler of its own")


@check(1, "a scaler in an own loop: scale, backward, unscale, clip, step", flavours="native")
def own_scaler(bench: Bench) -> None:
    trial = Trial(clip_norm=0.25)
    model, optimizer, data = setup(bench, trial)
    loss, scaler, torch = bench.loss("mlp", "mean"), _scaler(bench), bench.module
    for _ in range(trial.epochs):
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast(bench.backend.device.type, dtype=torch.bfloat16):  # float64 passes through it as it is
                value = loss(model(x), y)
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            unidist.clip_gradients(optimizer, max_norm=0.25)
            scaler.step(optimizer)
            scaler.update()
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")
    bench.equal_everywhere(model)


@check(2, "check_every notices one bit that differs, while training", flavours="native")
def checked_while_training(bench: Bench) -> None:
    from unidist.errors import MismatchError

    model = bench.model("linear")
    step = unidist.make_train_step(model, bench.optimizer("sgd", model, rate=2.0**-7), bench.loss("linear", "mean"), check_every=2)
    x = np.ones((4 * bench.replicas, 1))
    batches = list(unidist.wrap_data((x, 2 * x), global_batch_size=bench.replicas))
    for batch in batches[:2]:
        step(batch)
    if bench.size == 1:
        return
    if bench.rank == bench.size - 1:
        with bench.module.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 2.0**-50)
    step(batches[2])
    with compare.raises(MismatchError, "0.weight", f"rank {bench.size - 1}"):
        step(batches[3])


@check(12, "Keras' own means are named where it has them", flavours="keras", needs=())
def half_precision_of_keras(bench: Bench) -> None:
    model = bench.model("mlp")
    with compare.raises(UnsupportedError, "mixed_bfloat16"):
        unidist.make_train_step(model, bench.optimizer("sgd", model), bench.loss("mlp", "mean"), precision="bf16")
    with compare.raises(UnsupportedError, "LossScaleOptimizer"):
        unidist.make_train_step(model, bench.optimizer("sgd", model), bench.loss("mlp", "mean"), scaler=object())
