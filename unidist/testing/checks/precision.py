"""Contract 1, 2, 3, 4 and 12 of a step's precision, scaler and check_every, and of a scaler in own loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.errors import MismatchError, UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes
from unidist.testing.trial import Trial, setup, truth, verify

_NEEDS = (exchanges_in_backward,)
_RATE = 2.0**-7


def _doubling(bench: Bench, dtype: Any = None, batches: int = 1) -> tuple[Any, Any, unidist.Data]:
    """A weight of 1 for targets that are twice the inputs 1, 2, ..., the same in each batch: shares of two samples, and one of one."""
    n = max(2 * bench.replicas - 1, 2)
    model = bench.model("linear", {"0/kernel": np.ones((1, 1))}, wrapped=False)
    model = unidist.wrap_model(model if dtype is None else model.to(dtype))
    x = np.arange(1.0, n + 1, dtype=np.float64 if dtype is None else np.float32)[:, None]
    x = np.tile(x, (batches, 1))
    return model, bench.optimizer("plain", model, rate=_RATE), unidist.wrap_data((x, 2 * x), global_batch_size=n)


def _doubled(bench: Bench) -> float:
    """The weight after one step."""
    n = max(2 * bench.replicas - 1, 2)
    return float(1.0 + 2 * _RATE * np.square(np.arange(1.0, n + 1)).mean())


@check(1, "half precision: the forward pass is in it, weights and gradients are not; the step is one device's within its rounding",
       flavours="native", needs=_NEEDS, cases={"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16")})  # fmt: skip
def half_precision(bench: Bench, case: tuple[str, str]) -> None:
    """fp16 makes a scaler by itself, whose first scale is too large for these gradients: it skips updates, which count for nothing."""
    precision, name = case
    model, optimizer, data = _doubling(bench, bench.module.float32)
    seen = set()

    def loss(outputs: Any, targets: Any) -> Any:
        seen.add(bench.dtype(outputs))
        return ((outputs - targets) ** 2).mean()

    step = unidist.make_train_step(model, optimizer, loss, precision=precision)
    for _ in range(20):
        for batch in data:
            if step.updates == 0:
                step(batch)
    compare.same(seen, {name}, "the dtypes of the outputs")
    (parameter,) = model.parameters()
    compare.same((bench.dtype(parameter), bench.dtype(parameter.grad)), ("float32", "float32"), "the dtypes of weight and gradient")
    compare.same(step.updates, 1, "the number of updates")
    bench.close(bench.array(parameter), np.full((1, 1), _doubled(bench)), "the weight", tolerance=2.0**-8)
    unidist.assert_replicas_equal(model)


@check(1, "half precision: weights of (total, weight) losses count exactly", flavours="native", needs=_NEEDS)
def half_precision_total(bench: Bench) -> None:
    """A total in bfloat16, in which 257 is 256 and 259 is 260."""
    model, optimizer, data = _doubling(bench, bench.module.float32)
    weights = []

    def loss(outputs: Any, targets: Any) -> Any:
        weights.append(257.0 + 2 * bench.rank)
        return (outputs * 0).sum() + weights[-1], weights[-1]

    step = unidist.make_train_step(model, optimizer, loss, precision="bf16")
    for batch in data:
        step(batch)
    total = sum(257.0 + 2 * rank for rank in range(bench.size))
    bench.close(step._sums[1] + float(step._losses[0][1]), weights[0], "the weight that was counted")
    bench.close(step.mean_loss(), sum(bench.everywhere(_in_half(bench, weights[0]))) / total, "the mean loss", tolerance=1e-6)


def _in_half(bench: Bench, value: float) -> float:
    return float(bench.tensor(0.0, "bfloat16") + value)


SCALED = {
    "uneven": Trial(),
    "norm": Trial(clip_norm=0.25),
    "empty-share-of-a-window": Trial(rest="one", steps=3, accumulation=2, clip_norm=0.25),
    "total": Trial("classifier", "adam", form="total", steps=3, accumulation=2),
}


@check(4, "a scaler changes nothing: unscaled after the exchange, then clipped", flavours="native", needs=_NEEDS, cases=SCALED,
       few=("empty-share-of-a-window",))  # fmt: skip
def scaler(bench: Bench, trial: Trial) -> None:
    """Scales that differ between the ranks become rank 0's; powers of two, so that nothing is rounded."""
    scaler = bench.module.amp.GradScaler(bench.backend.device.type, init_scale=2.0 ** (6 + bench.rank), growth_interval=2)
    verify(bench, trial, scaler=scaler)
    compare.true(scaler.get_scale() > 2.0**6, "the scale grew")
    compare.same(len(set(bench.everywhere(scaler.get_scale()))), 1, "the number of different scales")


@check(4, "a gradient that is not finite on one rank: all skip the update, which is not counted and steps no scheduler",
       flavours="native", needs=_NEEDS, few=True, cases={"1": 1, "2": 2})  # fmt: skip
def overflow(bench: Bench, window: int) -> None:
    """In a window of two it comes with the first batch."""
    torch = bench.module
    model, optimizer, data = _doubling(bench, batches=window)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler(bench.backend.device.type, init_scale=8.0)
    factors = [float("inf") if bench.rank == bench.size - 1 else 1.0] + [1.0] * (2 * window - 1)

    def loss(outputs: Any, targets: Any) -> Any:
        return (factors.pop(0) * (outputs - targets) ** 2).mean()

    step = unidist.make_train_step(
        model, optimizer, loss, scaler=scaler, scheduler=scheduler, clip_norm=1e6, gradient_accumulation_steps=window
    )
    for batch in data:
        step(batch)
    bench.close(bench.weights(model)["0/kernel"], [[1.0]], "the weight after the skipped update")
    compare.same((step.updates, scaler.get_scale(), bench.learning_rate(optimizer)), (0, 4.0, _RATE), "updates, scale and rate")
    for batch in data:
        step(batch)
    compare.same((step.updates, scaler.get_scale(), bench.learning_rate(optimizer)), (1, 4.0, _RATE / 2), "updates, scale and rate after")
    bench.close(bench.weights(model)["0/kernel"], [[_doubled(bench)]], "the weight")
    bench.equal_everywhere(model)


@check(4, "a scaler in an own loop: scale, unscale_, clip, step, update", flavours="native", needs=_NEEDS)
def own_scaler(bench: Bench) -> None:
    trial = Trial(rest="one", clip_norm=0.25)
    model, optimizer, data = setup(bench, trial)
    loss, norms = bench.loss("mlp", "mean"), []
    scaler = unidist.broadcast(bench.module.amp.GradScaler(bench.backend.device.type, init_scale=2.0 ** (6 + bench.rank)))
    for _ in range(trial.epochs):
        for x, y in data:
            optimizer.zero_grad()
            scaler.scale(loss(model(x), y)).backward()
            scaler.unscale_(optimizer)
            norms.append(float(unidist.clip_gradients(optimizer, max_norm=0.25)))
            scaler.step(optimizer)
            scaler.update()
    expected = truth(bench, trial)
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.close(np.array(norms), expected.norms, "the norms before clipping")
    compare.same(scaler.get_scale(), 2.0**6, "the scale")


@check(1, "autocast in an own loop", flavours="native", needs=_NEEDS)
def own_autocast(bench: Bench) -> None:
    torch = bench.module
    model, optimizer, data = _doubling(bench, torch.float32)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast(bench.backend.device.type, torch.bfloat16):
            outputs = model(x)
            loss = ((outputs - y) ** 2).mean()
        compare.same(bench.dtype(outputs), "bfloat16", "the dtype of the outputs")
        loss.backward()
        optimizer.step()
    bench.close(bench.array(next(model.parameters())), np.full((1, 1), _doubled(bench)), "the weight", tolerance=2.0**-8)
    unidist.assert_replicas_equal(model)


@check(2, "check_every finds replicas that went apart, at the next update that it checks", needs=(several_processes,))
def check_every(bench: Bench) -> None:
    trial = Trial(rest="none", steps=4, epochs=1)
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"), check_every=2)
    for number, batch in enumerate(data):
        if number == 2 and bench.rank == 1:
            _drift(bench, model)
        if number < 3:
            step(batch)
        else:
            with compare.raises(MismatchError, "rank"):
                step(batch)
    compare.same(step.updates, 4, "step.updates")


def _drift(bench: Bench, model: Any) -> None:
    if bench.flavour == "keras":
        model.set_weights([value + 1.0 for value in model.get_weights()])
        return
    with bench.module.no_grad():
        next(model.parameters()).add_(1.0)


@check(12, "precision, scaler and check_every are checked")
def precision_arguments(bench: Bench) -> None:
    model = bench.model("mlp")
    optimizer, loss = bench.optimizer("sgd", model), bench.loss("mlp", "mean")
    for name, value in (("precision", "half"), ("check_every", -1), ("check_every", 1.5)):
        with compare.raises(ValueError, name, repr(value)):
            unidist.make_train_step(model, optimizer, loss, **{name: value})  # type: ignore[arg-type]


@check(12, "a scaler of another kind is refused, as is half precision for Keras models, which have a policy for it", needs=_NEEDS)
def precision_refused(bench: Bench) -> None:
    model = bench.model("mlp")
    optimizer, loss = bench.optimizer("sgd", model), bench.loss("mlp", "mean")
    with compare.raises(TypeError, "GradScaler"):
        unidist.make_train_step(model, optimizer, loss, scaler=object())
    if bench.flavour == "keras":
        import torch

        for precision, policy in (("bf16", "mixed_bfloat16"), ("fp16", "mixed_float16")):
            with compare.raises(UnsupportedError, policy):
                unidist.make_train_step(model, optimizer, loss, precision=precision)
        with compare.raises(UnsupportedError, "LossScaleOptimizer"):
            unidist.make_train_step(model, optimizer, loss, scaler=torch.amp.GradScaler("cpu"))


@check(
    2, "a scaler that is switched off on one rank only raises on all", flavours="native", needs=(exchanges_in_backward, several_processes)
)
def scaler_on_one_rank(bench: Bench) -> None:
    model = bench.model("mlp")
    optimizer, loss = bench.optimizer("sgd", model), bench.loss("mlp", "mean")
    scaler = bench.module.amp.GradScaler("cpu", enabled=bench.rank == 0)
    with compare.raises(MismatchError, "scaler", "switched off"):
        unidist.make_train_step(model, optimizer, loss, scaler=scaler)
