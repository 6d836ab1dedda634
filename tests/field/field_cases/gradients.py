"""Cases 1 to 12: how gradients are averaged and scaled."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from field_cases.toys import after_step, numbers, w1, weight_of
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward


@check(
    1,
    "one step of the toy, in whole and uneven batches",
    number=1,
    cases={"four": ((1, 2, 3, 4), 1.15), "three": ((1, 2, 3), 1.093333333333)},
)
def toy(bench: Bench, case: tuple[tuple[float, ...], float]) -> None:
    values, expected = case
    model, optimizer = w1(bench)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear"))
    for batch in unidist.wrap_data(numbers(*values), global_batch_size=len(values)):
        step(batch)
    bench.close(weight_of(bench, model), expected, "the weight", tolerance=1e-6)
    compare.true(step.updates == 1, "there was one update")


@check(4, "torch's own clip between backward and step clips the mean gradient", number=3, flavours="native")
def clip_before_the_exchange(bench: Bench) -> None:
    torch = bench.module
    model, optimizer = w1(bench, rate=1.0, weight=0.0)
    gradients = 0.5 + 2.0 * np.arange(bench.replicas)
    model(bench.tensor(gradients[bench.rank].reshape(1, 1))).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = gradients.mean()
    bench.close(float(norm), mean, "the norm")
    bench.close(weight_of(bench, model), -mean * min(1.0, 1.0 / (mean + 1e-6)), "the weight")


@check(3, "micro-batches of unequal sizes on each rank", number=5, flavours="native", needs=(exchanges_in_backward,))
def unequal_micro_batches(bench: Bench) -> None:
    parts = (((1, 2, 3), (4,)), ((5,), (6, 7, 8)))[: bench.size]
    model, optimizer = w1(bench)
    step = unidist.make_train_step(
        model, optimizer, lambda outputs, targets: (((outputs - targets) ** 2).sum(), len(targets)), gradient_accumulation_steps=2
    )
    for values in parts[bench.rank]:
        step(tuple(bench.tensor(part) for part in numbers(*values)))
    everything = [value for rank in parts for values in rank for value in values]
    bench.close(weight_of(bench, model), after_step(*everything), "the weight")


def _two_batches(bench: Bench) -> Any:
    """Rank r has 1 + r and then 2 + r."""
    ranks = np.arange(1.0, bench.replicas + 1)
    return np.concatenate([ranks, ranks + 1]).reshape(-1, 1)


@check(3, "the whole window is exchanged, not one of its batches", number=6, flavours="native", needs=(exchanges_in_backward,))
def right_micro_batch(bench: Bench) -> None:
    model, _ = w1(bench, weight=0.0)
    inputs = _two_batches(bench)
    for window in unidist.accumulate(unidist.wrap_data(inputs, global_batch_size=bench.replicas), 2):
        for x in window:
            model(x).mean().backward()
    bench.close(bench.array(next(model.parameters()).grad), [[inputs.mean()]], "the gradient")


@check(3, "accumulation is a mean on both frameworks", number=7)
def accumulation_is_a_mean(bench: Bench) -> None:
    model, optimizer = w1(bench, rate=1.0, weight=0.0)
    inputs = _two_batches(bench)
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: outputs, gradient_accumulation_steps=2)
    for batch in unidist.wrap_data((inputs, inputs), global_batch_size=bench.replicas):
        step(batch)
    bench.close(weight_of(bench, model), -inputs.mean(), "the weight", tolerance=1e-6)


@check(5, "sparse gradients with repeated indices", number=9, flavours="native", cases={"sgd": "SGD", "sparse-adam": "SparseAdam"})
def sparse(bench: Bench, kind: str) -> None:
    torch = bench.module
    layer = torch.nn.Embedding(4, 1, sparse=True).double()
    torch.nn.init.zeros_(layer.weight)
    model = unidist.wrap_model(layer)
    optimizer = unidist.wrap_optimizer(getattr(torch.optim, kind)(model.parameters(), lr=1.0), model)
    ids = [[0, 1, 1], [0, 2, 2]][: bench.size]
    model(bench.tensor(np.array(ids[bench.rank]))).sum().backward()
    optimizer.step()
    gradient = np.bincount(np.concatenate(ids), minlength=4) / bench.size
    expected = -gradient if kind == "SGD" else -np.sign(gradient)
    bench.close(bench.array(model.weight)[:, 0], expected, "the rows", tolerance=1e-6)


@check(8, "a loss made of the result of a collective raises in backward", number=12, flavours="native")
def through_a_collective(bench: Bench) -> None:
    x = bench.tensor(np.ones(2)).requires_grad_()
    mean = unidist.all_reduce(x)
    compare.true(not mean.requires_grad, "results are detached")
    with compare.raises(RuntimeError, "grad"):
        mean.sum().backward()
