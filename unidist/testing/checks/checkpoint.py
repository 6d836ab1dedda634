"""Contract 7 and 13: the whole state of a training goes into a folder and comes back, the same on every rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import unidist
from unidist.errors import CollectiveTimeoutError, MismatchError
from unidist.testing import compare, golden
from unidist.testing.bench import Bench
from unidist.testing.table import check, several_processes


@contextlib.contextmanager
def folder(bench: Bench) -> Iterator[Path]:
    """A folder of rank 0's for the job, gone afterwards."""
    mine = tempfile.mkdtemp(prefix="unidist-checkpoint-") if bench.rank == 0 else ""
    place = Path(bench.everywhere(mine)[0])
    try:
        yield place
    finally:
        bench.everywhere(None)
        if bench.rank == 0:
            shutil.rmtree(place)


def training(bench: Bench, kind: str = "adam", rate: float = 0.125, n: int = 10) -> tuple[Any, Any, Any, Any]:
    """(model, optimizer, data, step) of a small network."""
    model = bench.model("mlp")
    optimizer = bench.optimizer(kind, model, rate=rate)
    step = unidist.make_train_step(model, optimizer, bench.loss("mlp"))
    return model, optimizer, bench.data(golden.dataset("mlp", n), 4, shuffle=True), step


def go_on(step: Any, data: Any, updates: int) -> None:
    """So many updates, from where the data stands."""
    data.load_state_dict(data.state_dict())
    goal = step.updates + updates
    while step.updates < goal:
        for batch in data:
            step(batch)
            if step.updates == goal:
                break


@check(13, "save in the middle of an epoch, load: the same training", cases={"sgd": "sgd", "adam": "adam"}, few=("adam",))
def resume(bench: Bench, kind: str) -> None:
    model, optimizer, data, step = training(bench, kind)
    go_on(step, data, 2)
    with folder(bench) as place:
        unidist.save(place / "one", model=model, optimizer=optimizer, data=data, extra={"done": (2, float("inf"))})
        compare.same(sorted(os.listdir(place)), ["one"], "what is there when save returns")
        go_on(step, data, 3)
        truth = bench.weights(model)
        other, its_optimizer, its_data, its_step = training(bench, kind, rate=0.5)
        extra = unidist.load(place / "one", model=other, optimizer=its_optimizer, data=its_data)
    compare.same(extra, {"done": (2, float("inf"))}, "extra on every rank")
    compare.same(bench.learning_rate(its_optimizer), 0.125, "the learning rate")
    bench.equal_everywhere(other)
    go_on(its_step, its_data, 3)
    bench.close(bench.weights(other), truth, "the weights", tolerance=1e-12 if bench.tolerance < 1e-6 else bench.tolerance)


@check(13, "the random state comes back, each rank's own", flavours="once")
def random_state(bench: Bench) -> None:
    import random

    def draw() -> list[float]:
        own = bench.array(bench.module.rand(2)).tolist() if bench.flavour == "native" else []
        return [random.random(), float(np.random.random()), *own]

    random.seed(bench.rank)
    np.random.seed(bench.rank)
    model, optimizer, _, _ = training(bench, "plain")
    with folder(bench) as place:
        unidist.save(place / "one", model=model, optimizer=optimizer)
        drawn = draw()
        unidist.load(place / "one", model=model)
        compare.true(draw() != drawn, "loading a model alone leaves the streams alone")
        unidist.load(place / "one", model=model, optimizer=optimizer)
    compare.same(draw(), drawn, "what is drawn after loading")
    compare.same(len({tuple(row) for row in bench.everywhere(drawn)}), bench.size, "streams")


@check(7, "weights load without unidist, under their own names", flavours="native")
def plain_files(bench: Bench) -> None:
    import safetensors.torch

    model = bench.model("mlp")
    twin = bench.model("mlp", {name: value * 0 for name, value in golden.initial_weights("mlp").items()}, wrapped=False)
    with folder(bench) as place:
        unidist.save(place / "one", model={"net": model, "tied": unidist.wrap_model(bench.tied(np.eye(2)))})
        safetensors.torch.load_model(twin, place / "one" / "model.net.safetensors")
        compare.same(list(safetensors.torch.load_file(place / "one" / "model.tied.safetensors")), ["first.weight"], "a tied weight, once")
    for name, value in bench.weights(model).items():
        compare.same(bench.weights(twin)[name], value, name)


@check(7, "what does not fit raises on all ranks before anything is changed", flavours="each")
def misfits(bench: Bench) -> None:
    model, optimizer, data, step = training(bench, "sgd")
    with folder(bench) as place:
        unidist.save(place / "one", model=model, optimizer=optimizer, data=data)
        go_on(step, data, 1)
        before = bench.weights(model)
        classifier = bench.model("classifier")
        with compare.raises(MismatchError, "the model"):
            unidist.load(place / "one", model=classifier)
        with compare.raises(MismatchError, "Adam", "SGD"):
            unidist.load(place / "one", model=model, optimizer=bench.optimizer("adam", model))
        with compare.raises(MismatchError, "scheduler"):
            unidist.load(place / "one", model=model, scheduler=_Counter())
        with compare.raises(ValueError, "samples"):
            wrong = bench.data(golden.dataset("mlp", 10), 4, shuffle=True)
            wrong.load_state_dict({**data.state_dict(), "step": 1, "num_samples": 9})
        compare.same({k: v.tobytes() for k, v in bench.weights(model).items()}, {k: v.tobytes() for k, v in before.items()}, "the weights")


class _Counter:
    """A scheduler of a user's own."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@check(12, "what can't be written or read raises on all ranks", flavours="once")
def bad_folders(bench: Bench) -> None:
    model = bench.model("linear")
    with folder(bench) as place:
        path = place / "one"
        with compare.raises(FileNotFoundError, "no checkpoint"):
            unidist.load(path, model=model)
        with compare.raises(TypeError, "extra/when", "Path"):
            unidist.save(path, model=model, extra={"when": place})
        unidist.save(path, model=model, extra=1)
        _rank_0(bench, lambda: (place / "file").write_text("mine"))
        with compare.raises(OSError):
            unidist.save(place / "file" / "inside", model=model)
        with compare.raises(FileExistsError, "file"):
            unidist.save(place, model=model)
        weights = path / "model.safetensors"
        _rank_0(bench, lambda: weights.write_bytes(weights.read_bytes()[:-1]))
        with compare.raises(ValueError, "damaged", "model.safetensors"):
            unidist.load(path, model=model)
        unidist.save(path, model=model, extra=2)
        _rank_0(bench, lambda: path.rename(place / "one.old"))
        compare.same(unidist.load(path, model=model), 2, "what a writer left that was killed between the renames")
        manifest = place / "one.old" / "checkpoint.json"
        _rank_0(bench, lambda: manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 7')))
        with compare.raises(ValueError, "version 7"):
            unidist.load(path, model=model)


def _rank_0(bench: Bench, function: Any) -> None:
    if bench.rank == 0:
        function()
    bench.everywhere(None)


@check(9, "save on rank 0 alone says that all ranks must call it", flavours="once", needs=(several_processes,))
def alone(bench: Bench) -> None:
    model = bench.model("linear")
    with folder(bench) as place, bench.patience(1.0):
        if bench.rank == 0:
            with compare.raises(CollectiveTimeoutError, "save", "rank 1", "all ranks must call unidist.save"):
                unidist.save(place / "one", model=model)
        bench.control.set(f"alone {bench.rank} {place}", "1")
        bench.control.get(f"alone 0 {place}", 30.0)
        if bench.rank != 0:
            with contextlib.suppress(CollectiveTimeoutError):
                bench.control.gather("save", "")
        compare.true(not (place / "one").exists(), "nothing was written")


@check(2, "save and load compare what the ranks pass", flavours="once", needs=(several_processes,))
def other_objects(bench: Bench) -> None:
    model = bench.model("linear")
    data = bench.data(golden.dataset("linear", 4), 4)
    with folder(bench) as place, compare.raises(MismatchError, "save got other objects"):
        unidist.save(place / "one", **({"model": model} if bench.rank == 0 else {"data": data}))
