"""Contract 5: frozen, tied, twice used and unused parameters behave as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from unidist.errors import MismatchError, PeerFailedError
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes
from unidist.testing.trial import Trial, setup


def _without(prefix: str) -> Callable[[golden.Weights], golden.Weights]:
    """Gradients in which one layer's are zero, so that SGD leaves it."""
    return lambda gradients: {name: value * (not name.startswith(prefix)) for name, value in gradients.items()}


def _frozen_truth(bench: Bench, trial: Trial, prefix: str) -> golden.Result:
    epoch = golden.windows(golden.batches(trial.samples(bench.replicas), trial.batch(bench.replicas)), 1)
    optimizer = golden.make_optimizer(bench.formula, "sgd")
    return golden.train_windows(golden.NETWORKS["mlp"], optimizer, epoch * trial.epochs, clip=_without(prefix))  # type: ignore[arg-type]


@check(5, "a frozen layer stays bit for bit, the others train as on one device", cases={"first": "0", "last": "1"}, few=("first",),
       flavours={"native": ("first", "last"), "keras": ("first",)})  # fmt: skip
def frozen(bench: Bench, number: str) -> None:
    trial = Trial(rest="one")
    model, optimizer, data = setup(bench, trial, freeze=number)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    for _ in range(trial.epochs):
        for batch in data:
            step(batch)
    found = bench.weights(model)
    for name, value in golden.initial_weights("mlp").items():
        if name.startswith(number):
            compare.same(np.asarray(found[name]), value, f"the frozen {name!r}")
    bench.close(found, _frozen_truth(bench, trial, number).weights, "weight")
    bench.equal_everywhere(model)


@check(5, "a model without trainable parameters (a teacher) is made equal and can be used", flavours="native")
def teacher(bench: Bench) -> None:
    values = golden.initial_weights("mlp", seed=bench.rank)
    model = bench.model("mlp", values, freeze=("0", "1"))
    inputs = golden.dataset("mlp", 3).inputs
    expected = golden.NETWORKS["mlp"].forward(golden.initial_weights("mlp", seed=0), inputs)
    bench.close(bench.forward(model, inputs), expected, "the outputs")
    bench.close(bench.array(model(bench.tensor(inputs))), expected, "the outputs with gradients on")


@check(5, "frozen and thawed while training", flavours="native")
def thawed(bench: Bench) -> None:
    """Layer 0 is frozen in the second and third of four updates."""
    trial = Trial(rest="none", steps=4, epochs=1)
    model, _, data = setup(bench, trial)
    optimizer = bench.optimizer("plain", model)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp", "mean"))
    for number, batch in enumerate(data):
        model[0].requires_grad_(number not in (1, 2))
        step(batch)
    weights, formula = golden.initial_weights("mlp"), golden.TorchSGD(0.125)
    for number, part in enumerate(golden.batches(trial.samples(bench.replicas), trial.batch(bench.replicas))):
        clip: Any = _without("0") if number in (1, 2) else golden.Clip()
        weights = golden.train_windows(golden.NETWORKS["mlp"], formula, [[part]], weights=weights, clip=clip).weights
    bench.close(bench.weights(model), weights, "weight")
    bench.equal_everywhere(model)


@check(5, "a layer that is applied twice, under two names where torch ties it", few=True)
def tied(bench: Bench) -> None:
    """y = sum(x W W), mean over samples; dL/dW = mean((x^T (1 W^T)) + ((x W)^T 1)), with 1 a row of ones."""
    weight = np.array([[1.0, 2.0], [-1.0, 0.5]])
    n = 2 * bench.replicas + 1
    x = np.arange(1.0, 2 * n + 1).reshape(n, 2)
    with unidist.scope():
        model = unidist.wrap_model(bench.tied(weight))
    step = unidist.make_train_step(model, bench.optimizer("plain", model, rate=0.01), lambda outputs, targets: bench.ops().sum(outputs, 1))
    for batch in unidist.wrap_data((x, np.zeros(n)), global_batch_size=n):
        step(batch)
    ones = np.ones((n, 2))
    gradient = (x.T @ (ones @ weight.T) + (x @ weight).T @ ones) / n
    (found,) = bench.weights(model).values()
    bench.close(found if bench.flavour == "keras" else found.T, weight - 0.01 * gradient, "the weight")
    if bench.flavour == "native":
        compare.true(model.first.weight is model.second.weight, "the tie holds")
        compare.same(list(model.state_dict()), ["first.weight", "second.weight"], "the keys")


@check(5, "a sparse embedding, with ids that repeat", flavours="native", needs=(exchanges_in_backward,), few=True)
def sparse_embedding(bench: Bench) -> None:
    """Zeros, the mean over ranks of the sums of rows [0, 1, 1] and [0, 2, 2]: each id's row falls by its count over the ranks."""
    torch = bench.module
    model = unidist.wrap_model(torch.nn.Embedding(4, 1, sparse=True, dtype=torch.float64))
    with torch.no_grad():
        model.weight.zero_()
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    ids = np.array([0, 1, 1]) if bench.rank == 0 else np.array([0, 2, 2])
    model(bench.tensor(ids)).sum().backward()
    optimizer.step()
    counts = np.array([[1.0], [2.0 / bench.size], [2.0 * (bench.size - 1) / bench.size], [0.0]])
    bench.close(bench.array(model.weight), -counts, "the weight")


@check(5, "a parameter that no rank uses stays as it is, weight decay or not", flavours="native")
def unused(bench: Bench) -> None:
    model, optimizer, step, data = _half_used(bench, find_unused_parameters=True)
    before = bench.array(model.spare.weight)
    for batch in data:
        step(batch)
    compare.same(bench.array(model.spare.weight), before, "the unused weight")
    _check_used(bench, model)
    unidist.assert_replicas_equal(model)


@check(5, "without find_unused_parameters it stays too, or the step raises on every rank, by name, before any weight moves",
       flavours="native", ends_job=True, needs=(several_processes,))  # fmt: skip
def unused_unsaid(bench: Bench) -> None:
    model, optimizer, step, data = _half_used(bench)
    before = [bench.array(parameter) for parameter in model.parameters()]
    try:
        for batch in data:
            step(batch)
    except (MismatchError, PeerFailedError) as error:
        compare.true("spare.weight" in str(error) and "find_unused_parameters" in str(error), f"the message helps: {error}")
        for parameter, value in zip(model.parameters(), before, strict=True):
            compare.same(bench.array(parameter), value, "a weight after the error")
        return
    compare.same(bench.array(model.spare.weight), before[-2], "the unused weight")
    _check_used(bench, model)


def _half_used(bench: Bench, **options: Any) -> tuple[Any, Any, Any, Any]:
    torch = bench.module

    class HalfUsed(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
            self.spare = torch.nn.Linear(2, 2, dtype=torch.float64)
            torch.nn.init.ones_(self.used.weight)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    model = unidist.wrap_model(HalfUsed(), **options)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.0625), model)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"))
    return model, optimizer, step, bench.data(golden.dataset("linear", 2 * bench.replicas), 2 * bench.replicas)


def _check_used(bench: Bench, model: Any) -> None:
    x = golden.dataset("linear", 2 * bench.replicas).inputs
    bench.close(bench.array(model.used.weight), [[1 + 0.01 * (2 * (x**2).mean() - 0.0625)]], "the used weight")


@check(5, "used on one rank only: averaged with zeros", flavours="native", needs=(several_processes, exchanges_in_backward))
def used_on_one_rank(bench: Bench) -> None:
    torch = bench.module

    class Switch(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.always = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
            self.sometimes = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
            torch.nn.init.zeros_(self.always.weight)
            torch.nn.init.zeros_(self.sometimes.weight)

        def forward(self, x: Any, both: bool) -> Any:
            return self.always(x) + (self.sometimes(x) if both else 0.0)

    model = unidist.wrap_model(Switch(), find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    optimizer.zero_grad()
    model(bench.tensor(np.ones((1, 1))), bench.rank == 1).sum().backward()
    optimizer.step()
    bench.close(bench.array(model.always.weight), [[-1.0]], "the weight used everywhere")
    bench.close(bench.array(model.sometimes.weight), [[-1.0 / bench.size]], "the weight used on rank 1")
    unidist.assert_replicas_equal(model)


@check(5, "an output that the loss does not use", flavours="native", needs=(exchanges_in_backward,))
def unused_output(bench: Bench) -> None:
    torch = bench.module

    class Heads(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
            self.b = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)

        def forward(self, x: Any) -> Any:
            return self.a(x), self.b(x)

    model = unidist.wrap_model(Heads(), find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5), model)
    start = [bench.array(p) for p in model.parameters()]
    optimizer.zero_grad()
    model(bench.tensor(np.full((2, 1), 1.0 + bench.rank)))[0].mean().backward()
    optimizer.step()
    mean = np.mean([1.0 + rank for rank in range(bench.size)])
    bench.close(bench.array(model.a.weight), start[0] - (mean + 0.5 * start[0]), "the head that is used")
    compare.same(bench.array(model.b.weight), start[1], "the head that is not")


@check(5, "activation checkpointing, the same layer three times", flavours="native", needs=(exchanges_in_backward,))
def checkpointed(bench: Bench) -> None:
    _train_checkpointed(bench, reentrant=False)


@check(5, "reentrant checkpointing is right, or the step raises, naming the other kind, before any weight moves", flavours="native",
       needs=(exchanges_in_backward, several_processes), ends_job=True)  # fmt: skip
def reentrant(bench: Bench) -> None:
    try:
        _train_checkpointed(bench, reentrant=True)
    except (unidist.UnsupportedError, PeerFailedError) as error:
        compare.true("use_reentrant=False" in str(error), f"the message helps: {error}")


def _train_checkpointed(bench: Bench, reentrant: bool) -> None:
    """y = w^3 x: dy/dw = 3 w^2 x."""
    torch = bench.module

    class Thrice(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
            torch.nn.init.constant_(self.layer.weight, 0.5)

        def forward(self, x: Any) -> Any:
            for _ in range(3):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=reentrant)
            return x

    model = unidist.wrap_model(Thrice())
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.125), model)
    x = bench.tensor(np.array([[1.0 + bench.rank]])).requires_grad_()
    model(x).sum().backward()
    optimizer.step()
    mean = np.mean([1.0 + rank for rank in range(bench.size)])
    bench.close(bench.array(model.layer.weight), [[0.5 - 0.125 * 3 * 0.25 * mean]], "the weight")


@check(5, "a Keras variable that no rank uses stays as it is", flavours="keras")
def unused_variable(bench: Bench) -> None:
    """Two heads, of which the loss sees the first: mean of (sum(x) + b - 0)^2 / 2 over equal rows of ones, whose gradient is 2."""
    with unidist.scope():
        model = unidist.wrap_model(bench.two_outputs())
        optimizer = bench.optimizer("sgd", model, rate=0.125)
    x = np.ones((2 * bench.replicas, 2))
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: bench.ops().mean(bench.ops().square(outputs[0]) / 2))
    for batch in unidist.wrap_data((x, x[:, :1]), global_batch_size=len(x)):
        step(batch)
    used, spare = [np.asarray(value) for value in unidist.get_weights(model).values()][::2]
    bench.close(used, np.full((2, 1), 1 - 0.125 * 2), "the kernel in use")
    bench.close(spare, np.ones((2, 1)), "the other")
