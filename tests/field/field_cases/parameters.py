"""Cases 13 to 22: parameters that are unused, shared, frozen or not there yet; outputs that are not used."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.errors import MismatchError, UnsupportedError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes

_NEEDS = (exchanges_in_backward,)


def _two_layers(bench: Bench, **options: Any) -> Any:
    """`used` and `spare`, Linear(2, 2) of ones; its forward pass uses the layers that it is told."""
    torch = bench.module

    class TwoLayers(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.ones_(self.used.weight)
            torch.nn.init.ones_(self.spare.weight)

        def forward(self, x: Any, names: tuple[str, ...] = ("used",)) -> Any:
            return sum(getattr(self, name)(x) for name in names)

    return unidist.wrap_model(TwoLayers().double(), **options)


def _row(bench: Bench) -> Any:
    return bench.tensor([[1.0 + bench.rank, 1.0]])


DECAYING = {
    "sgd": ("SGD", {"lr": 0.5, "weight_decay": 0.1}), "momentum": ("SGD", {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 0.5, "weight_decay": 0.1}), "adagrad": ("Adagrad", {"lr": 0.5, "weight_decay": 0.1}),
}  # fmt: skip


@check(5, "what lies outside the forward pass stops no other's exchange, and no rank drifts", number=13, flavours="native", needs=_NEEDS)
def outside_the_forward_pass(bench: Bench) -> None:
    model = _two_layers(bench, find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(bench.module.optim.SGD(model.parameters(), lr=0.125), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(_row(bench)).square().mean().backward()
        optimizer.step()
    unidist.assert_replicas_equal(model)
    compare.same(bench.array(model.spare.weight), np.ones((2, 2)), "the spare weight")


@check(5, "used on no rank: neither decay nor momentum moves it", number=14, flavours="native", needs=_NEEDS, cases=DECAYING)
def unused_anywhere(bench: Bench, case: tuple[str, dict[str, float]]) -> None:
    name, settings = case
    model = _two_layers(bench, find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(getattr(bench.module.optim, name)(model.parameters(), **settings), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(_row(bench)).sum().backward()
        optimizer.step()
    compare.same(bench.array(model.spare.weight), np.ones((2, 2)), "the spare weight")
    compare.true((bench.array(model.used.weight) != 1.0).all(), "the used weight moved")


@check(5, "used on one rank only: averaged with zeros", number=14, flavours="native", needs=(exchanges_in_backward, several_processes))
def used_on_one_rank(bench: Bench) -> None:
    model = _two_layers(bench, find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(bench.module.optim.SGD(model.parameters(), lr=1.0), model)
    names = ("used", "spare") if bench.rank == 0 else ("used",)
    model(bench.tensor([[1.0, 1.0]]), names).sum().backward()
    optimizer.step()
    bench.close(bench.array(model.spare.weight), np.full((2, 2), 1.0 - 1.0 / bench.size), "the weight that one rank used")


@check(5, "a rank whose loss has no graph takes part with zeros when it says so by an empty product", number=15, flavours="native",
       needs=(exchanges_in_backward, several_processes))  # fmt: skip
def all_unused_on_one_rank(bench: Bench) -> None:
    model = _two_layers(bench, find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(bench.module.optim.SGD(model.parameters(), lr=1.0), model)
    output = model(bench.tensor([[1.0, 1.0]])).sum()
    (output if bench.rank == 0 else 0.0 * output).backward()
    optimizer.step()
    bench.close(bench.array(model.used.weight), np.full((2, 2), 1.0 - 1.0 / bench.size), "the weight")
    with compare.raises(RuntimeError, "grad"):
        unidist.backward(bench.tensor(1.0))  # a constant has nothing to go back through: torch's own words, on this rank


@check(5, "an output that is not in the loss: its head has no gradient and stays", number=16, flavours="native", needs=_NEEDS)
def unused_output(bench: Bench) -> None:
    torch = bench.module

    class Heads(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x: Any) -> Any:
            hidden = self.body(x)
            return self.a(hidden), self.b(hidden)

    model = unidist.wrap_model(Heads().double(), find_unused_parameters=True)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1), model)
    before = bench.array(model.b.weight)
    model(_row(bench))[0].sum().backward()
    compare.true(model.b.weight.grad is None, "the head that is not in the loss has no gradient")
    optimizer.step()
    compare.same(bench.array(model.b.weight), before, "its weight")
    unidist.assert_replicas_equal(model)


CHECKPOINTS = {"plain": None, "checkpointed": False}


@check(5, "one layer three times, under activation checkpointing or not", number=17, flavours="native", needs=_NEEDS, cases=CHECKPOINTS)
def three_times(bench: Bench, reentrant: bool | None) -> None:
    torch = bench.module
    from torch.utils.checkpoint import checkpoint

    def apply(layer: Any, x: Any) -> Any:
        for _ in range(3):
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        return x

    class Thrice(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return apply(self.layer, x)

    torch.manual_seed(2)
    model = Thrice().double()
    alone = torch.nn.Linear(2, 2).double()
    alone.load_state_dict(model.layer.state_dict())
    unidist.wrap_model(model)
    rows = [bench.tensor([[1.0 + rank, 1.0]]) for rank in range(bench.size)]
    model(rows[bench.rank]).square().sum().backward()
    mean = bench.array(model.layer.weight.grad)
    x = torch.cat(rows)
    for _ in range(3):
        x = alone(x)
    (x.square().sum() / bench.size).backward()
    bench.close(mean, bench.array(alone.weight.grad), "the gradient")


@check(5, "two layers share one weight: the gradients add up, the tie holds after wrap, broadcast and load", number=18, flavours="native",
       needs=_NEEDS)  # fmt: skip
def tied(bench: Bench) -> None:
    torch = bench.module

    class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.ones_(self.first.weight)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x))

    model = unidist.wrap_model(Tied().double())
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(bench.tensor([[1.0 + bench.rank] * 2])).sum().backward()
    optimizer.step()
    mean = np.mean([1.0 + rank for rank in range(bench.size)])
    # For x = (a, a) each entry's gradient is 2a from the first use and 2a from the second.
    bench.close(bench.array(model.first.weight), np.full((2, 2), 1.0 - 4.0 * mean), "the weight")
    unidist.broadcast(model)
    model.load_state_dict(model.state_dict())
    compare.true(model.first.weight is model.second.weight, "the tie holds")
    unidist.assert_replicas_equal(model)


@check(5, "a teacher is made equal and returned; a frozen half stays and is not reduced", number=19, flavours="native", needs=_NEEDS)
def frozen(bench: Bench) -> None:
    torch = bench.module
    teacher = torch.nn.Linear(2, 2).double().requires_grad_(False)
    with torch.no_grad():
        teacher.weight.fill_(float(bench.rank))
    compare.true(unidist.wrap_model(teacher) is teacher, "the teacher is itself")
    compare.true(not bench.array(teacher.weight).any(), "it has rank 0's weights")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    model[0].requires_grad_(False)
    unidist.wrap_model(model)
    before = bench.array(model[0].weight)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1), model)
    model(_row(bench)).sum().backward()
    compare.true(model[0].weight.grad is None, "what is frozen has no gradient")
    optimizer.step()
    compare.same(bench.array(model[0].weight), before, "the frozen weight")
    unidist.assert_replicas_equal(model)


@check(5, "frozen after one step, thawed after two more", number=20, flavours="native", needs=_NEEDS)
def changed_later(bench: Bench) -> None:
    torch = bench.module
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    alone = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    unidist.wrap_model(model)
    alone.load_state_dict(model.state_dict())
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.125), model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.125)
    rows = [bench.tensor([[1.0 + rank, 1.0]]) for rank in range(bench.size)]
    for number in range(5):
        for net, own, batch in ((model, optimizer, rows[bench.rank]), (alone, reference, torch.cat(rows))):
            net[0].requires_grad_(number not in (1, 2))
            own.zero_grad()
            net(batch).square().mean().backward()
            own.step()
    for found, expected in zip(model.parameters(), alone.parameters()):
        bench.close(bench.array(found), bench.array(expected), "a weight")
    unidist.assert_replicas_equal(model)


DIFFERENT = {"depth": lambda nn, rank: [nn.Linear(2, 2) for _ in range(1 + rank)], "width": lambda nn, rank: [nn.Linear(2, 2 + rank)]}


@check(2, "ranks that build different models raise at once, on all, by name and shape", number=21, flavours="native",
       needs=(several_processes,), cases=DIFFERENT)  # fmt: skip
def different_models(bench: Bench, layers: Any) -> None:
    nn = bench.module.nn
    with compare.raises(MismatchError, "rank 0"):
        unidist.wrap_model(nn.Sequential(*layers(nn, min(bench.rank, 1))))


@check(2, "a lazy module is told to see a batch first, on every rank", number=22, flavours="native")
def lazy(bench: Bench) -> None:
    with compare.raises(UnsupportedError, "batch", "weight"):
        unidist.wrap_model(bench.module.nn.LazyLinear(2))
