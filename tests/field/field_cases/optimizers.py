"""Cases 27 to 33, 37 and 53: optimizers, their state, schedulers and scalers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

import unidist
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.table import check, exchanges_in_backward, several_processes

_NEEDS = (exchanges_in_backward,)


def _net(bench: Bench, *, wrapped: bool = True) -> Any:
    nn = bench.module.nn
    bench.module.manual_seed(6)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return unidist.wrap_model(model) if wrapped else model


def _learn(bench: Bench, model: Any, optimizer: Any, *, steps: int = 1, seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(bench.tensor(generator.standard_normal((3, 2)))).square().mean().backward()
        optimizer.step()


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "sgd": lambda optim, p: optim.SGD(p, lr=0.125), "momentum": lambda optim, p: optim.SGD(p, lr=0.125, momentum=0.5),
    "adam": lambda optim, p: optim.Adam(p, lr=0.125), "adamw": lambda optim, p: optim.AdamW(p, lr=0.125, weight_decay=0.25),
    "amsgrad": lambda optim, p: optim.Adam(p, lr=0.125, amsgrad=True), "adagrad": lambda optim, p: optim.Adagrad(p, lr=0.125),
    "rmsprop": lambda optim, p: optim.RMSprop(p, lr=0.125, centered=True), "adadelta": lambda optim, p: optim.Adadelta(p),
    "nadam": lambda optim, p: optim.NAdam(p, lr=0.125), "rprop": lambda optim, p: optim.Rprop(p, lr=0.125),
}  # fmt: skip


@check(2, "state that only rank 0 has, or none at all, reaches every rank, and no weight moves", number=27, flavours="native", cases=KINDS)
def state_of_rank_0(bench: Bench, make: Callable[[Any, Any], Any]) -> None:
    model = _net(bench, wrapped=False)
    optimizer = make(bench.module.optim, model.parameters())
    if bench.rank == 0:
        _learn(bench, model, optimizer, steps=3)
    unidist.wrap_model(model)
    before = [bench.array(parameter) for parameter in model.parameters()]
    unidist.wrap_optimizer(optimizer, model)
    for parameter, value in zip(model.parameters(), before):
        compare.same(bench.array(parameter), value, "a weight")
    unidist.assert_replicas_equal(optimizer)
    states = bench.everywhere(sorted((i, key) for i, held in optimizer.state_dict()["state"].items() for key in held))
    compare.same(states, [states[0]] * bench.size, "what the ranks' states hold")
    _learn(bench, model, optimizer, seed=bench.rank)
    unidist.assert_replicas_equal(model)


@check(
    2,
    "state with frozen parameters: it is broadcast, and they stay bit for bit",
    number=28,
    flavours="native",
    cases={"adamw": "adamw", "adagrad": "adagrad"},
)
def state_with_frozen(bench: Bench, kind: str) -> None:
    model = _net(bench, wrapped=False)
    model[0].requires_grad_(False)
    optimizer = KINDS[kind](bench.module.optim, model.parameters())
    if bench.rank == 0:
        _learn(bench, model, optimizer, steps=2)
    unidist.wrap_model(model)
    frozen = bench.array(model[0].weight)
    unidist.wrap_optimizer(optimizer, model)
    _learn(bench, model, optimizer, steps=2, seed=bench.rank)
    compare.same(bench.array(model[0].weight), frozen, "the frozen weight")
    unidist.assert_replicas_equal(optimizer)
    unidist.assert_replicas_equal(model)


@check(2, "several groups without names, each with its own hyper-parameters", number=29, flavours="native")
def groups(bench: Bench) -> None:
    model = _net(bench)
    parts = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[2].parameters()), "lr": 0.25 * (1 + bench.rank)}]
    optimizer = unidist.wrap_optimizer(bench.module.optim.SGD(parts, lr=1.0), model)
    _learn(bench, model, optimizer, seed=bench.rank)
    compare.same([group["lr"] for group in optimizer.param_groups], [0.5, 0.25], "the rates")
    unidist.assert_replicas_equal(model)


@check(1, "a batch that is skipped on all ranks after backward leaves nothing behind", number=30, flavours="native", needs=_NEEDS,
       cases={"sgd": "momentum", "adam": "adam"})  # fmt: skip
def skipped(bench: Bench, kind: str) -> None:
    model, plain = _net(bench), _net(bench)
    optimizer, reference = (unidist.wrap_optimizer(KINDS[kind](bench.module.optim, net.parameters()), net) for net in (model, plain))
    x = bench.tensor(np.random.default_rng(bench.rank).standard_normal((3, 2)))
    for bad in (False, True, False):
        model(x * (1000.0 if bad else 1.0)).square().mean().backward()
        if bad:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters()):
        compare.same(bench.array(found), bench.array(expected), "a weight")


SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda s, o: s.StepLR(o, 1, 0.5), "one-cycle": lambda s, o: s.OneCycleLR(o, max_lr=0.5, total_steps=5),
    "sequential": lambda s, o: s.SequentialLR(
        o, [s.LinearLR(o, 0.25, total_iters=2), s.CosineAnnealingLR(o, T_max=3)], milestones=[2]),
    "lambda": lambda s, o: s.LambdaLR(o, lambda step: 1.0 / (1 + step)),
}  # fmt: skip


@check(
    7,
    "a scheduler takes the wrapped optimizer and is stepped once per update, as on one device",
    number=32,
    flavours="native",
    cases=SCHEDULES,
)
def schedulers(bench: Bench, make: Callable[[Any, Any], Any]) -> None:
    """OneCycleLR over exactly its steps, a sequence of schedules; windows of 2, an odd last one."""
    torch = bench.module
    model = _net(bench)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    alone = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    reference = make(torch.optim.lr_scheduler, alone)
    step = unidist.make_train_step(
        model, optimizer, lambda outputs, targets: (outputs - targets).square().mean(), gradient_accumulation_steps=2, scheduler=scheduler
    )
    x = np.random.default_rng(3).standard_normal((7 * bench.replicas, 2))
    rates, expected = [], []
    for batch in unidist.wrap_data((x, x[:, :1]), global_batch_size=bench.replicas):
        before = step.updates
        step(batch)
        if step.updates > before:
            rates.append(optimizer.param_groups[0]["lr"])
            alone.step()
            reference.step()
            expected.append(alone.param_groups[0]["lr"])
    compare.same(len(rates), 4, "the updates")
    bench.close(np.array(rates), np.array(expected), "the rates")


@check(7, "four steps of StepLR(1, 0.5) give a sixteenth of the rate on each rank", number=31, flavours="native", needs=_NEEDS)
def step_rates(bench: Bench) -> None:
    model = _net(bench)
    optimizer = unidist.wrap_optimizer(bench.module.optim.SGD(model.parameters(), lr=1.0), model)
    scheduler = bench.module.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(4):
        _learn(bench, model, optimizer, seed=bench.rank)
        scheduler.step()
    compare.same(optimizer.param_groups[0]["lr"], 0.0625, "the rate")


@check(7, "the wrapped optimizer is an optimizer in every respect", number=33, flavours="native", needs=_NEEDS,
       cases={"sgd": "momentum", "adam": "adam"})  # fmt: skip
def still_an_optimizer(bench: Bench, kind: str) -> None:
    torch = bench.module
    model = _net(bench)
    bare_kind = KINDS[kind](torch.optim, _net(bench, wrapped=False).parameters())
    optimizer = unidist.wrap_optimizer(KINDS[kind](torch.optim, model.parameters()), model)
    compare.true(isinstance(optimizer, type(bare_kind)) and type(optimizer) is type(bare_kind), "its class is its own")
    compare.same(optimizer.defaults, bare_kind.defaults, "its defaults")
    _learn(bench, model, optimizer, steps=2, seed=bench.rank)
    compare.same(len(optimizer.state), 4, "what `state` holds")
    optimizer.zero_grad()
    compare.true(all(p.grad is None for p in model.parameters()), "zero_grad sets None, as torch does by default")
    copied = copy.deepcopy(optimizer)
    compare.same(type(copied), type(optimizer), "the class of a deep copy")
    copied.zero_grad()
    other = _net(bench, wrapped=False)
    other.load_state_dict(model.state_dict())
    bare = KINDS[kind](torch.optim, other.parameters())
    bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if bench.size == 1:
        x = bench.tensor(np.ones((1, 2)))
        for net, own in ((model, optimizer), (other, bare)):
            net(x).sum().backward()
            own.step()
        for found, expected in zip(other.parameters(), model.parameters()):
            compare.same(bench.array(found), bench.array(expected), "a weight after the round trip")
    head = unidist.wrap_model(torch.nn.Linear(1, 1).double())
    optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.5})
    optimizer.zero_grad()
    x = bench.tensor(np.full((1, 2), 1.0 + bench.rank))
    head(model(x)).sum().backward()
    optimizer.step()
    unidist.assert_replicas_equal(head)
    unidist.assert_replicas_equal(model)


@check(5, "state of a model whose half is frozen goes round and stays with its parameter", number=37, flavours="native", needs=_NEEDS)
def frozen_state_round_trip(bench: Bench) -> None:
    """Frozen parameters have no state; after they thaw they begin with none, and the others keep theirs."""
    torch = bench.module
    model = _net(bench, wrapped=False)
    model[0].requires_grad_(False)
    unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.125), model)
    _learn(bench, model, optimizer, steps=2, seed=bench.rank)
    kept, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    compare.same(sorted(state["state"]), [2, 3], "the parameters that have state")
    again = _net(bench, wrapped=False)
    again.load_state_dict(kept)
    unidist.wrap_model(again)
    resumed = torch.optim.Adam(again.parameters(), lr=0.125)
    resumed.load_state_dict(state)
    unidist.wrap_optimizer(resumed, again)
    compare.true(again[0].weight not in resumed.state and again[2].weight in resumed.state, "state is with the parameter it was with")
    _learn(bench, again, resumed, seed=bench.rank)
    unidist.assert_replicas_equal(again)
    unidist.assert_replicas_equal(resumed)


@check(1, "a scaler that was loaded on rank 0 only, and an infinite gradient on rank 1 only: one scale, all skip", number=53,
       flavours="native", needs=(exchanges_in_backward, several_processes))  # fmt: skip
def scaler_state(bench: Bench) -> None:
    torch = bench.module
    model = _net(bench)
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.125), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    if bench.rank == 0:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    unidist.broadcast(scaler)
    compare.same(scaler.get_scale(), 4.0, "the scale")
    before = bench.array(model[0].weight)
    x = np.full((1, 2), np.inf if bench.rank == 1 else 1.0)
    scaler.scale(model(bench.tensor(x)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    compare.same(scaler.get_scale(), 2.0, "the scale after the skipped update")
    compare.same(bench.array(model[0].weight), before, "the weight")
    optimizer.zero_grad()
    scaler.scale(model(bench.tensor(np.full((1, 2), 1.0 + bench.rank))).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    compare.true((bench.array(model[0].weight) != before).any(), "the next update takes place")
    unidist.assert_replicas_equal(model)
