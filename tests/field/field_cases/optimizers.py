"""Cases 27 to 33 and 37: the state of optimizers, param groups and schedulers."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from field_cases.toys import w1
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check

_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"weight_decay": 0.1}), "momentum": ("SGD", {"momentum": 0.5}), "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}), "adagrad": ("Adagrad", {}), "rmsprop": ("RMSprop", {"momentum": 0.5}), "adadelta": ("Adadelta", {}),
}  # fmt: skip


@check(2, "state on rank 0 only comes to all, and moves no weight", number=27, flavours="native", cases=_KINDS)
def state_on_one_rank(bench: Bench, case: tuple[str, dict[str, Any]]) -> None:
    """Cases 27, 28 and 29: the first layer is frozen, and there are two groups without names."""
    torch = bench.module
    name, settings = case
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    model[0].requires_grad_(False)
    groups = [{"params": [*model[0].parameters(), *model[1].parameters()], "lr": 0.01}, {"params": model[2].parameters()}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.02 * (bench.rank + 1), **settings)
    for _ in range(3 if bench.rank == 0 else 0):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    unidist.wrap_model(model)
    before = [bench.array(p) for p in model.parameters()]
    unidist.wrap_optimizer(optimizer, model)
    for parameter, value in zip(model.parameters(), before, strict=True):
        compare.same(bench.array(parameter), value, "a weight")
    compare.same([group["lr"] for group in optimizer.param_groups], [0.01, 0.02], "the rates")
    unidist.assert_replicas_equal(optimizer)
    held = optimizer.state[model[2].weight]
    compare.same(float(held.get("step", 3)), 3.0, "the number of updates that the state holds")
    model(bench.tensor(np.full((1, 2), 1.0 + bench.rank))).sum().backward()
    optimizer.step()
    for parameter, value in zip(model[0].parameters(), before[:2], strict=True):
        compare.same(bench.array(parameter), value, "a frozen weight")
    unidist.assert_replicas_equal(model)
    unidist.assert_replicas_equal(optimizer)


def _schedulers(torch: Any) -> dict[str, Any]:
    rates = torch.optim.lr_scheduler
    return {
        "step": lambda o: rates.StepLR(o, 1, 0.5),
        "one-cycle": lambda o: rates.OneCycleLR(o, max_lr=0.5, total_steps=5),
        "sequential": lambda o: rates.SequentialLR(o, [rates.LinearLR(o, 0.5, total_iters=2), rates.CosineAnnealingLR(o, 2)], [2]),
    }


@check(
    7, "the curve of a scheduler is one process's", number=31, flavours="native", cases={k: k for k in ("step", "one-cycle", "sequential")}
)
def schedulers(bench: Bench, kind: str) -> None:
    """Cases 31 and 32: four updates; for StepLR the rate ends at a sixteenth."""
    torch = bench.module
    model, optimizer = w1(bench)
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    mine, theirs = _schedulers(torch)[kind](optimizer), _schedulers(torch)[kind](bare)
    step = unidist.make_train_step(model, optimizer, bench.loss("linear"), scheduler=mine)
    rows = np.ones((4 * bench.replicas, 1))
    found, expected = [], []
    for batch in unidist.wrap_data((rows, rows), global_batch_size=bench.replicas):
        step(batch)
        bare.step()
        theirs.step()
        found.append(bench.learning_rate(optimizer))
        expected.append(bare.param_groups[0]["lr"])
    bench.close(found, expected, "the rates")
    compare.same(len(found), 4, "the number of updates")
    if kind == "step":
        bench.close(found[-1], 0.01 / 16, "the last rate")
