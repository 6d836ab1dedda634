"""Cases 1 to 9: how gradients are averaged and scaled."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from field_cases.toys import after_step, numbers, once, w1, weight_of
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes, two_processes


@check(1, "one step of the toy, in whole and uneven batches", number=1, cases={"four": (1, 2, 3, 4), "three": (1, 2, 3), "one": (5,)})
def toy(bench: Bench, values: tuple[float, ...]) -> None:
    model, optimizer = w1(bench)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear", "object"))
    once(step, numbers(*values), len(values))
    bench.close(weight_of(bench, model), after_step(*values), "the weight")
    bench.close(step.mean_loss(), np.mean(np.square(values)), "the loss")


@check(4, "clipping acts on the mean of the ranks' gradients, and returns its norm", number=3, flavours="native",
       needs=(exchanges_in_backward, two_processes), cases={"norm": ("norm", -1.5 / (1.5 + 1e-6)), "value": ("value", -1.0)})  # fmt: skip
def clip_after_the_exchange(bench: Bench, case: tuple[str, float]) -> None:
    """Gradients 0.5 and 2.5 from weight 0, rate 1: their mean 1.5 becomes 1, where torch adds 1e-6 to the norm; clipped before, 0.75."""
    kind, expected = case
    model, optimizer = w1(bench, rate=1.0, weight=0.0)
    (model(bench.tensor([[0.5 if bench.rank == 0 else 2.5]]))).sum().backward()
    norm = unidist.clip_gradients(optimizer, **{f"max_{kind}": 1.0})
    optimizer.step()
    bench.close(weight_of(bench, model), expected, "the weight")
    bench.close(float(norm), 1.5, "the norm before clipping")


MICRO = {"sgd": "plain", "momentum": "sgd", "adam": "adam"}


@check(
    3,
    "unequal micro-batches count by their samples",
    number=5,
    needs=(exchanges_in_backward, two_processes),
    flavours="native",
    cases=MICRO,
)
def unequal_micro_batches(bench: Bench, kind: str) -> None:
    """{1,2,3}, {4} on rank 0 and {5}, {6,7,8} on rank 1: the gradient of the mean over 1 to 8."""
    model, _ = w1(bench)
    optimizer = bench.optimizer(kind, model, rate=0.01)
    parts = [(1, 2, 3), (4,)] if bench.rank == 0 else [(5,), (6, 7, 8)]
    whole, alone = w1(bench)
    reference = bench.optimizer(kind, whole, rate=0.01)
    optimizer.zero_grad()
    for values in parts:
        x, y = (bench.tensor(part) for part in numbers(*values))
        unidist.backward(((model(x) - y) ** 2).sum() * bench.size / 8)
    optimizer.step()
    reference.zero_grad()
    x, y = (bench.tensor(part) for part in numbers(*range(1, 9)))
    ((whole(x) - y) ** 2).mean().backward()
    reference.step()
    bench.close(weight_of(bench, model), weight_of(bench, whole), "the weight")
    if kind == "plain":
        bench.close(weight_of(bench, model), 1.51, "the weight")


@check(3, "the same through windows of data that is split, by make_train_step and in own loops", number=5,
       needs=(exchanges_in_backward, two_processes), flavours="native", cases={"step": True, "own": False})  # fmt: skip
def windows_of_split_data(bench: Bench, stepping: bool) -> None:
    """Rank 0 holds 1 to 5, rank 1 holds 6 to 8, taken in windows of two batches of 3 and 2."""
    x, y = numbers(*((1, 2, 3, 4, 5) if bench.rank == 0 else (6, 7, 8)))
    model, optimizer = w1(bench)
    data = unidist.wrap_data((x, y), per_replica_batch_size=3, already_sharded=True)
    if stepping:
        step = unidist.make_train_step(model, optimizer, bench.loss("linear", "mean"), gradient_accumulation_steps=2)
        for batch in data:
            step(batch)
    else:
        for window in unidist.accumulate(data, 2):
            optimizer.zero_grad()
            for inputs, targets in window:
                bench.loss("linear", "mean")(model(inputs), targets).backward()
            optimizer.step()
    bench.close(weight_of(bench, model), after_step(*range(1, 9)), "the weight")


@check(3, "the micro-batch that is exchanged is the last: a mean over the window and the ranks", number=6, flavours="native",
       needs=(exchanges_in_backward, two_processes), cases={"step": True, "own": False})  # fmt: skip
def last_micro_batch(bench: Bench, stepping: bool) -> None:
    """Inputs 1 + r, then 2 + r, loss w*x, rate 1 (also case 7): the mean is 2."""
    model, optimizer = w1(bench, rate=1.0, weight=0.0)
    batches = [bench.tensor([[1.0 + bench.rank]]), bench.tensor([[2.0 + bench.rank]])]
    if stepping:
        step = unidist.make_train_step(model, optimizer, compute_loss=lambda net, batch: net(batch).mean(), gradient_accumulation_steps=2)
        for batch in batches:
            step(batch)
    else:
        (window,) = unidist.accumulate(batches, 2)
        for batch in window:
            model(batch).mean().backward()
        bench.close(float(next(model.parameters()).grad), 2.0, "the gradient")
        optimizer.step()
    bench.close(weight_of(bench, model), -2.0, "the weight")


@check(3, "a window is a mean over its batches and the replicas, on every backend", number=7)
def window_mean(bench: Bench) -> None:
    """Replica r has inputs 1 + r, then 2 + r; loss w*x, rate 1."""
    model, optimizer = w1(bench, rate=1.0, weight=0.0)
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: bench.ops().mean(outputs), gradient_accumulation_steps=2)
    x = np.concatenate([1.0 + np.arange(bench.replicas), 2.0 + np.arange(bench.replicas)])[:, None]
    for batch in unidist.wrap_data((x, x), global_batch_size=bench.replicas):
        step(batch)
    bench.close(weight_of(bench, model), -x.mean(), "the weight")


SPARSE = {"SGD": {"lr": 1.0}, "SparseAdam": {"lr": 0.125}, "Adagrad": {"lr": 0.125}}


@check(5, "sparse gradients with repeated ids, in optimizers that take them", number=9, flavours="native",
       needs=(exchanges_in_backward, several_processes), cases=SPARSE)  # fmt: skip
def sparse(bench: Bench, settings: dict[str, float]) -> None:
    """Ids [0,1,1] and [0,2,2]; one device has the mean of both sums."""
    torch = bench.module
    kind = getattr(torch.optim, next(name for name, value in SPARSE.items() if value is settings))

    def table() -> Any:
        layer = torch.nn.Embedding(4, 1, sparse=True, dtype=torch.float64)
        torch.nn.init.zeros_(layer.weight)
        return layer

    model, alone = unidist.wrap_model(table()), table()
    optimizer, reference = unidist.wrap_optimizer(kind(model.parameters(), **settings), model), kind(alone.parameters(), **settings)
    ids = [[0, 1, 1]] + [[0, 2, 2]] * (bench.size - 1)
    for _ in range(2):
        optimizer.zero_grad()
        model(bench.tensor(ids[bench.rank])).sum().backward()
        optimizer.step()
        reference.zero_grad()
        (sum(alone(bench.tensor(row)).sum() for row in ids) / bench.size).backward()
        reference.step()
    bench.close(bench.array(model.weight), bench.array(alone.weight), "the table")
    compare.true(not bench.array(model.weight)[3].any(), "the row that nobody used is untouched")
