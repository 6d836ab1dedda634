"""Contract 1 and 3 in loops that users write themselves, where the gradients are exchanged in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from unidist.testing import compare, golden
from unidist.testing.bench import CLASS_WEIGHTS, Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes
from unidist.testing.trial import Trial, setup, truth

Exchange = Callable[[Bench, Any, Any, unidist.Data], None]
_NEEDS = (exchanges_in_backward,)


def _plain(bench: Bench, outputs: Any, targets: Any, data: unidist.Data) -> None:
    bench.loss("classifier", "mean")(outputs, targets).backward()


def _said(bench: Bench, outputs: Any, targets: Any, data: unidist.Data) -> None:
    unidist.backward(bench.loss("classifier", "mean")(outputs, targets))


def _share_said(bench: Bench, outputs: Any, targets: Any, data: unidist.Data) -> None:
    unidist.backward(bench.loss("classifier", "mean")(outputs, targets), share=data.share)


def _weight_said(bench: Bench, outputs: Any, targets: Any, data: unidist.Data) -> None:
    assert data.share is not None
    unidist.backward(bench.loss("classifier", "mean")(outputs, targets), weight=data.share.size)


def _samples(bench: Bench, outputs: Any, targets: Any, data: unidist.Data) -> None:
    unidist.backward(bench.loss("classifier", "samples")(outputs, targets))


def _total(bench: Bench, outputs: Any, targets: Any, data: unidist.Data) -> None:
    """A borrowed sample has a weight like any other here; that it does not count is unidist's part."""
    unidist.backward(bench.loss("classifier", "total")(outputs, targets))


EXCHANGES: dict[str, Exchange] = {
    "plain": _plain, "backward": _said, "share": _share_said, "weight": _weight_said, "samples": _samples, "total": _total,
}  # fmt: skip
CASES = {f"{how}-{rest}": (how, rest) for how in EXCHANGES for rest in ("none", "uneven", "one")}


@check(
    1, "an own loop trains like one device", cases=CASES, flavours="native", needs=_NEEDS, few=("plain-uneven", "plain-one", "total-uneven")
)
def own_loop(bench: Bench, case: tuple[str, str]) -> None:
    how, rest = case
    trial = Trial("classifier", "adam", rest, form="total" if how == "total" else "mean")
    model, optimizer, data = setup(bench, trial)
    for _ in range(trial.epochs):
        for x, y in data:
            optimizer.zero_grad()
            EXCHANGES[how](bench, model(x), y, data)
            optimizer.step()
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")
    bench.equal_everywhere(model)


WINDOWS = {f"{k}-{rest}": (k, rest) for k in (2, 3) for rest in ("none", "uneven", "one")}


@check(3, "accumulate(data, k) in an own loop", cases=WINDOWS, flavours="native", needs=_NEEDS, few=("2-uneven", "2-one"))
def own_windows(bench: Bench, case: tuple[int, str]) -> None:
    k, rest = case
    trial = Trial("mlp", "sgd", rest, steps=3, accumulation=k)
    model, optimizer, data = setup(bench, trial)
    loss, lengths = bench.loss("mlp", "mean"), []
    for _ in range(trial.epochs):
        for window in unidist.accumulate(data, k):
            lengths.append(len(window))
            optimizer.zero_grad()
            for x, y in window:
                loss(model(x), y).backward()
            optimizer.step()
    expected = truth(bench, trial)
    compare.same(len(lengths), len(expected.norms), "the number of windows")
    bench.close(bench.weights(model), expected.weights, "weight")
    bench.equal_everywhere(model)


@check(3, "the micro-batch that is exchanged is the last, and holds the whole window", flavours="native", needs=_NEEDS)
def window_gradient(bench: Bench) -> None:
    """Weight 0, loss w * x, one sample each: the gradient is the mean over window and ranks."""
    model = bench.model("linear", {"0/kernel": np.zeros((1, 1))})
    optimizer = bench.optimizer("plain", model, rate=1.0)
    inputs = np.arange(1.0, 2 * bench.replicas + 1)[:, None]
    for window in unidist.accumulate(unidist.wrap_data(inputs, global_batch_size=bench.replicas), 2):
        optimizer.zero_grad()
        for x in window:
            model(x).mean().backward()
        optimizer.step()
    bench.close(bench.weights(model)["0/kernel"], [[-inputs.mean()]], "the weight")


@check(1, "after backward every .grad is the reduced gradient", flavours="native", needs=_NEEDS)
def reduced_in_grad(bench: Bench) -> None:
    trial = Trial(rest="uneven", steps=0, epochs=1)
    model, _, data = setup(bench, trial)
    for x, y in data:
        bench.loss("mlp", "mean")(model(x), y).backward()
    sums = golden.compute_sums(golden.NETWORKS["mlp"], golden.initial_weights("mlp"), trial.samples(bench.replicas))
    found = [bench.array(parameter.grad) for parameter in model.parameters()]
    gradients = golden.torch_layout(dict(zip(golden.NETWORKS["mlp"].shapes(), found, strict=True)))
    bench.close(gradients, sums.mean_gradients(), "gradient")


@check(1, "a skipped batch (backward, then zero_grad) leaves nothing behind", flavours="native", needs=_NEEDS)
def skipped_batch(bench: Bench) -> None:
    trial = Trial(rest="none", steps=3, epochs=1)
    model, optimizer, data = setup(bench, trial)
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        bench.loss("mlp", "mean")(model(x), y).backward()
        if number != 1:
            optimizer.step()
    samples, batch = trial.samples(bench.replicas), trial.batch(bench.replicas)
    kept = [[part] for number, part in enumerate(golden.batches(samples, batch)) if number != 1]
    expected = golden.train_windows(golden.NETWORKS["mlp"], golden.make_optimizer("torch", "sgd"), kept)
    bench.close(bench.weights(model), expected.weights, "weight")


@check(1, "two forward passes and one backward, and two models in one loss", flavours="native", needs=_NEEDS)
def two_models(bench: Bench) -> None:
    """Loss: mean over samples of the squared output of the second model applied to the first's, on x and on 2x."""
    first, second = bench.model("linear"), bench.model("linear")
    optimizers = [bench.optimizer("plain", model, rate=0.001) for model in (first, second)]
    n = 2 * bench.replicas + 1
    values = np.arange(1.0, n + 1)[:, None]
    for x in unidist.wrap_data(values, global_batch_size=n):
        ((second(first(x)) ** 2).mean() + (second(first(2 * x)) ** 2).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
    gradient = 2 * 5 * (values**2).mean()
    for model in (first, second):
        bench.close(bench.weights(model)["0/kernel"], [[1 - 0.001 * gradient]], "the weight")


@check(1, "batches of several loaders: the share must be said when they count differently", flavours="native",
       needs=(*_NEEDS, several_processes))  # fmt: skip
def several_loaders(bench: Bench) -> None:
    model = bench.model("mlp")
    optimizer = bench.optimizer("sgd", model)
    trial = Trial(rest="uneven", steps=0, epochs=1)
    one = bench.data(golden.dataset("mlp", 2 * bench.replicas), 2 * bench.replicas)
    other = bench.data(trial.samples(bench.replicas), trial.batch(bench.replicas))
    for (_, _), (x, y) in zip(one, other):
        with compare.raises(ValueError, "share=data.share"):
            model(x)
        optimizer.zero_grad()
        unidist.backward(bench.loss("mlp", "mean")(model(x), y), share=other.share)
        optimizer.step()
    bench.close(bench.weights(model), truth(bench, trial).weights, "weight")


@check(1, "losses of torch that weigh classes are right as scalars, or refused", flavours="native", needs=_NEEDS,
       cases={"weight": {"weight": True}, "ignore-index": {"ignore_index": True}})  # fmt: skip
def class_weights(bench: Bench, case: dict[str, bool]) -> None:
    """CrossEntropyLoss(weight=...) and (ignore_index=...) divide by the weights, not by the samples."""
    torch = bench.module
    trial = Trial("classifier", "sgd", "uneven", steps=1, epochs=1)
    named = dict(enumerate(CLASS_WEIGHTS)) if "weight" in case else {0: 1.0, 1: 1.0}
    loss = (
        torch.nn.CrossEntropyLoss(bench.tensor(np.array(CLASS_WEIGHTS))) if "weight" in case else torch.nn.CrossEntropyLoss(ignore_index=2)
    )
    model, optimizer, data = setup(bench, trial)
    step = unidist.make_train_step(model, optimizer, loss)
    for batch in data:
        step(batch)
    samples = trial.samples(bench.replicas)
    expected = golden.train(
        golden.NETWORKS["classifier"], golden.make_optimizer("torch", "sgd"), data=samples, global_batch_size=trial.batch(bench.replicas),
        sample_weight=golden.class_sample_weights(samples.targets, named), denominator="weights",
    )  # fmt: skip
    bench.close(bench.weights(model), expected.weights, "weight")
