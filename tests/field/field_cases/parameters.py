"""Cases 13 to 22 and 26: unused, shared, frozen and lazy parameters, and buffers of every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.errors import UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check


@check(5, "a parameter outside the forward pass stays, with weight decay and momentum; the others are exchanged", number=13,
       flavours="native", cases={"sgd": "SGD", "adamw": "AdamW"})  # fmt: skip
def unused(bench: Bench, kind: str) -> None:
    """Cases 13, 14 and 16: ranks see other rows, one head is used by no loss."""
    torch = bench.module
    settings: dict[str, Any] = {"lr": 0.125, "weight_decay": 0.1, **({"momentum": 0.5} if kind == "SGD" else {})}

    def train(wrap: bool) -> tuple[Any, Any]:
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1)}).double()
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        model.forward = lambda x: (model["used"](x), model["unused"](x))
        if wrap:
            unidist.wrap_model(model, find_unused_parameters=True)
        optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)
        if wrap:
            unidist.wrap_optimizer(optimizer, model)
        for number in range(3):
            optimizer.zero_grad()
            rows = np.arange(2.0 * bench.size).reshape(bench.size, 2) + number
            x = bench.tensor(rows[bench.rank : bench.rank + 1] if wrap else rows)
            (model(x)[0] ** 2).mean().backward()
            optimizer.step()
        return [bench.array(p) for p in model["used"].parameters()], [bench.array(p) for p in model["unused"].parameters()]

    used, alone = train(True)[0], train(False)[0]
    for value, expected in zip(used, alone, strict=True):
        bench.close(value, expected, "a weight that is used")
    for value in train(True)[1]:
        compare.same(value, np.ones_like(value), "a weight that is not")


@check(5, "tied weights", number=18, flavours="native")
def tied(bench: Bench) -> None:
    torch = bench.module
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)).double()
    model[1].weight = model[0].weight
    torch.nn.init.ones_(model[0].weight)
    unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(bench.tensor(np.full((1, 2), 1.0 + bench.rank))).sum().backward()
    optimizer.step()
    expected = 1.0 - 4 * np.mean(np.arange(1.0, bench.size + 1))
    unidist.broadcast(model)
    model.load_state_dict(model.state_dict())
    compare.true(model[0].weight is model[1].weight, "the tie holds")
    bench.close(bench.array(model[1].weight), np.full((2, 2), expected), "the weight")


@check(5, "a wholly frozen model is made equal and stays usable", number=19, flavours="native")
def teacher(bench: Bench) -> None:
    torch = bench.module
    model = torch.nn.Linear(1, 1, bias=False).double().requires_grad_(False)
    torch.nn.init.constant_(model.weight, 1.0 + bench.rank)
    unidist.wrap_model(model)
    bench.close(bench.array(model(bench.tensor(np.ones((1, 1))))), [[1.0]], "the output")


@check(5, "a lazy module is refused with what to do", number=22, flavours="native")
def lazy(bench: Bench) -> None:
    with compare.raises(UnsupportedError, "lazy", "one batch"):
        unidist.wrap_model(bench.module.nn.LazyLinear(2))


@check(2, "buffers and frozen parameters of bool, int and half dtypes", number=26, flavours="native")
def dtypes(bench: Bench) -> None:
    torch = bench.module
    model = torch.nn.Linear(1, 1)
    kinds = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64", "complex64")
    for kind in kinds:
        model.register_buffer(f"{kind}_buffer", torch.full((3,), bench.rank).to(getattr(torch, kind)))
    model.count = torch.nn.Parameter(torch.full((2,), bench.rank), requires_grad=False)
    unidist.wrap_model(model)
    for kind in kinds:
        held = getattr(model, f"{kind}_buffer")
        compare.same(bench.dtype(held), kind, "the dtype")
        compare.true(not held.any(), f"the {kind} buffer is rank 0's")
    compare.same((bench.dtype(model.count), model.count.tolist()), ("int64", [0, 0]), "the integer parameter")


@check(5, "a layer frozen after one step and thawed after two more", number=20, flavours="native")
def thawed(bench: Bench) -> None:
    """y = b * a * x with weights 1: a follows only in the first and fourth update."""
    torch = bench.module
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)).double()
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    mean, a, b = np.mean(np.arange(1.0, bench.size + 1)), 1.0, 1.0
    for number in range(4):
        frozen = number in (1, 2)
        model[0].requires_grad_(not frozen)
        optimizer.zero_grad()
        model(bench.tensor([[1.0 + bench.rank]])).sum().backward()
        optimizer.step()
        a, b = a - 0.01 * mean * b * (not frozen), b - 0.01 * mean * a
    bench.close([float(layer.weight) for layer in model], [a, b], "the weights")


@check(6, "two forward passes with BatchNorm, one backward, as in a GAN", number=23, flavours="native")
def two_forwards(bench: Bench) -> None:
    torch = bench.module
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).double()
    unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    rows = bench.tensor(np.random.default_rng(bench.rank).normal(size=(2, 4, 2)))
    for _ in range(2):
        optimizer.zero_grad()
        (model(rows[0]).square().mean() - model(rows[1]).sigmoid().mean()).backward()
        optimizer.step()
    gradients = bench.everywhere([bench.array(p.grad).tobytes() for p in model.parameters()])
    compare.true(all(row == gradients[0] for row in gradients), "the gradients are the same on all ranks")
    compare.true(all(bool(p.grad.any()) for p in model[2].parameters()), "there are gradients")
