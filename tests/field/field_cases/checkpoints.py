"""Cases 35 to 37: checkpoints. What needs several jobs is in tests/field/test_resume.py."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import numpy as np

import unidist
from field_cases.toys import numbers, w1, weight_of
from unidist.errors import CollectiveTimeoutError, MismatchError
from unidist.testing import compare
from unidist.testing.bench import Bench
from unidist.testing.checks.checkpoint import folder
from unidist.testing.table import check, several_processes


@check(9, "saving on rank 0 only ends within the timeout, and the next save works", number=35, flavours="once", needs=(several_processes,))
def rank_0_saves(bench: Bench) -> None:
    model, optimizer = w1(bench)
    with folder(bench) as place:
        with bench.patience(1.0):
            if bench.rank == 0:
                with compare.raises(CollectiveTimeoutError, "all ranks must call unidist.save"):
                    unidist.save(place / "one", model=model, optimizer=optimizer)
            bench.control.set(f"35 {bench.rank} {place}", "")
            bench.control.get(f"35 0 {place}", 30.0)
            if bench.rank != 0:
                with contextlib.suppress(CollectiveTimeoutError):
                    bench.control.gather("save", "")
        unidist.save(place / "one", model=model, optimizer=optimizer)
        complete = sorted(os.listdir(place / "one"))
    compare.same(bench.everywhere(complete), [complete] * bench.size, "the files that each rank sees when its call returns")
    compare.true("checkpoint.json" in complete, "the checkpoint is complete")


@check(13, "Keras' fit in two parts: weights and slots as without the break, the epoch on every rank", number=36, flavours="keras")
def fit_in_parts(bench: Bench) -> None:
    keras = bench.module
    x, y = numbers(1, 2, 3, 4)

    def compiled() -> Any:
        with unidist.scope():
            model = bench.model("linear", {"0/kernel": np.ones((1, 1))})
            model.compile(unidist.wrap_optimizer(keras.optimizers.Adam(0.01), model), loss="mse")
        return model

    def fit(model: Any, first: int, last: int) -> None:
        model.fit(x, y, batch_size=4, initial_epoch=first, epochs=last, shuffle=False, verbose=0)

    whole, begun, again = compiled(), compiled(), compiled()
    fit(whole, 0, 2)
    fit(begun, 0, 1)
    with folder(bench) as place:
        unidist.save(place / "one", model=begun, optimizer=begun.optimizer, extra={"epoch": 1})
        extra = unidist.load(place / "one", model=again, optimizer=again.optimizer)
    compare.same(bench.everywhere(extra["epoch"]), [1] * bench.size, "the epoch on every rank")
    fit(again, extra["epoch"], 2)
    bench.close(weight_of(bench, again), 1.019997, "the kernel", tolerance=2e-6)
    for mine, truth in zip(again.optimizer.variables, whole.optimizer.variables, strict=True):
        bench.close(bench.array(mine), bench.array(truth), f"the slot {mine.name}")


@check(
    13, "every optimizer's state and hyper-parameters come back", number=36, flavours={"native": ("Adagrad", "RMSprop", "LBFGS", "SGD"),
    "keras": ("Adagrad", "RMSprop", "SGD")}, cases={name: name for name in ("Adagrad", "RMSprop", "LBFGS", "SGD")},
)  # fmt: skip
def optimizers(bench: Bench, name: str) -> None:
    native = bench.flavour == "native"
    module = bench.module.optim if native else bench.module.optimizers
    then = {"SGD": {"momentum": 0.5, "nesterov": True}, "RMSprop": {"momentum": 0.5, "centered": True}}.get(name, {})
    now = {} if native else {key: value / 2 if key == "momentum" else value for key, value in then.items()}

    def made(rate: float, settings: dict[str, Any]) -> tuple[Any, Any]:
        model = bench.model("linear", {"0/kernel": np.ones((1, 1))})
        with unidist.scope():
            rates = {"lr" if native else "learning_rate": rate}
            optimizer = getattr(module, name)(*([model.parameters()] if native else []), **rates, **settings)
            return model, unidist.wrap_optimizer(optimizer, model)

    model, optimizer = made(0.125, then)
    _update(bench, model, optimizer)
    other, its_optimizer = made(0.5, now)
    with folder(bench) as place:
        unidist.save(place / "one", model=[model], optimizer=[optimizer])
        unidist.load(place / "one", model=[other], optimizer=[its_optimizer])
    before = bench.weights(model)
    for _ in range(2):
        _update(bench, model, optimizer)
        _update(bench, other, its_optimizer)
    bench.close(bench.weights(other), bench.weights(model), "the weights", tolerance=0.0)
    compare.true(weight_of(bench, model) != float(next(iter(before.values())).reshape(())), "it trains")


@check(7, "freezing between save and load moves no state to another parameter", number=37)
def freezing(bench: Bench) -> None:
    """The optimizer holds what trains: with the first layer frozen then, with the last frozen now, with the last left out."""
    with folder(bench) as place:
        model = bench.model("mlp", freeze=("0",))
        optimizer = _over_trained(bench, model)
        _update(bench, model, optimizer)
        unidist.save(place / "one", model=model, optimizer=optimizer)
        truth = _moments(bench, model, optimizer)
        free = bench.model("mlp")
        its_optimizer = _over_trained(bench, free)
        unidist.load(place / "one", model=free, optimizer=its_optimizer)
        found = _moments(bench, free, its_optimizer)
        for name, value in found.items():
            bench.close(value, truth.get(name, 0 * value), f"the state of {name}", tolerance=0.0)
        compare.true(set(truth) < set(found) or bench.flavour == "native", "more parameters have state than before")
        _update(bench, free, its_optimizer)
        unidist.save(place / "two", model=free, optimizer=its_optimizer)
        again = bench.model("mlp", freeze=("0",))
        unidist.load(place / "two", model=again, optimizer=_over_trained(bench, again))
        if bench.flavour == "native":
            fewer = bench.module.optim.Adam(list(free.parameters())[2:])
            with compare.raises(MismatchError, "0.weight", "frozen"):
                unidist.load(place / "two", model=free, optimizer=fewer)


def _over_trained(bench: Bench, model: Any) -> Any:
    with unidist.scope():
        if bench.flavour == "native":
            optimizer = bench.module.optim.Adam([p for p in model.parameters() if p.requires_grad])
        else:
            optimizer = bench.module.optimizers.Adam()
        return unidist.wrap_optimizer(optimizer, model)


def _update(bench: Bench, model: Any, optimizer: Any) -> None:
    """One update in a loop of a user's own, on the same rows on every rank."""
    if bench.flavour == "keras":
        grads = [bench.tensor(np.full(v.shape, number + 1.0)) for number, v in enumerate(model.trainable_variables)]
        optimizer.apply(grads, model.trainable_variables)
        return

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss

    width = next(model.parameters()).shape[1]
    x = bench.tensor(np.arange(1.0, 2 * width + 1).reshape(2, width) / 8)
    optimizer.step(closure)


def _moments(bench: Bench, model: Any, optimizer: Any) -> dict[str, Any]:
    """First moments by weight."""
    if bench.flavour == "native":
        return {n: bench.array(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters() if p in optimizer.state}
    places = {id(v): str(index) for index, v in enumerate(model.weights)}
    return {places[id(v)]: bench.array(m) for v, m in zip(optimizer._trainable_variables, optimizer._momentums, strict=True)}


@check(13, "dropout goes on with the masks that it would have drawn", number=36)
def dropout(bench: Bench) -> None:
    random.seed(1)

    def made() -> tuple[Any, Any]:
        if bench.flavour == "native":
            nn = bench.module.nn
            model = unidist.wrap_model(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double())
            return model, bench.module.optim.SGD(model.parameters(), lr=0.125)
        keras = bench.module
        with unidist.scope():
            model = unidist.wrap_model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)]))
            return model, unidist.wrap_optimizer(keras.optimizers.SGD(0.125), model)

    x = np.ones((8, 4))
    model, optimizer = made()
    other, its_optimizer = made()
    bench.forward(model, x, training=True)
    with folder(bench) as place:
        unidist.save(place / "one", model=model, optimizer=optimizer)
        masks = [bench.forward(model, x, training=True) != 0 for _ in range(2)]
        unidist.load(place / "one", model=other, optimizer=its_optimizer)
    compare.same([(bench.forward(other, x, training=True) != 0).tolist() for _ in range(2)], [mask.tolist() for mask in masks], "the masks")
    compare.true((masks[0] != masks[1]).any(), "two masks differ")
