"""Cases 35 to 37 between jobs: a training that was saved and goes on elsewhere ends with the weights of one that was never broken.

Every job is one of `unidist.testing.run`: models in float64 with dropout-free layers, so that the number of workers must not matter.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from unidist.checkpoint import folder
from unidist.testing import compare, run
from unidist.testing.jobs import clean_environment

N, BATCH, EPOCHS = 22, 4, 2  # the last batch of an epoch has two samples
STEPS = EPOCHS * -(-N // BATCH)
TOLERANCE = 1e-10


def arrays() -> tuple[Any, Any]:
    """Inputs (22, 3) and targets (22, 1) in float64."""
    x = np.random.default_rng(5).normal(size=(N, 3))
    return x, np.sin(x @ np.array([[1.0], [-2.0], [0.5]]))


def torch_job(path: str, begin: bool, steps: int, save: bool) -> dict[str, Any]:
    """Train on torch: from the start or from the checkpoint, so many updates, then save; the weights."""
    import torch

    import unidist

    unidist.init(framework="torch", seed=3)
    torch.manual_seed(0 if begin else 99)  # what a new job begins with must not count
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    model = unidist.wrap_model(model)
    optimizer = unidist.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.125 if begin else 7.0), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    data = unidist.wrap_data(torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays())), global_batch_size=BATCH, shuffle=True)
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: ((outputs - targets) ** 2).mean(1), scheduler=scheduler)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    done = 0 if begin else unidist.load(path, **objects)["done"]
    _train(step, data, steps)
    if save:
        unidist.save(path, **objects, extra={"done": done + steps})
    return {"weights": unidist.get_weights(model), "done": done + steps, "rate": optimizer.param_groups[0]["lr"]}


def keras_job(path: str, begin: bool, steps: int, save: bool) -> dict[str, Any]:
    """The same with Keras on TensorFlow."""
    import keras

    import unidist

    unidist.init(framework="tensorflow", seed=3)
    keras.utils.set_random_seed(0 if begin else 99)
    keras.config.set_floatx("float64")
    layers = keras.layers
    with unidist.scope():
        model = unidist.wrap_model(keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]))
        optimizer = unidist.wrap_optimizer(keras.optimizers.Adam(0.125 if begin else 7.0, epsilon=2.0**-20), model)
    data = unidist.wrap_data(arrays(), global_batch_size=BATCH, shuffle=True)
    step = unidist.make_train_step(model, optimizer, keras.losses.MeanSquaredError())
    done = 0 if begin else unidist.load(path, model=model, optimizer=optimizer, data=data)["done"]
    _train(step, data, steps)
    if save:
        unidist.save(path, model=model, optimizer=optimizer, data=data, extra={"done": done + steps})
    return {"weights": unidist.get_weights(model), "done": done + steps, "rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate))}


def _train(step: Any, data: Any, steps: int) -> None:
    goal = step.updates + steps
    while step.updates < goal:
        for batch in data:
            step(batch)
            if step.updates == goal:
                break


JOBS = {"torch": torch_job, "tensorflow": keras_job}
CHAINS = {
    "torch": [("ddp", 2), ("horovod", 2), ("local", 1), ("ddp", 3)],
    "tensorflow": [("mirrored", 2), ("horovod", 2), ("local", 1), ("mirrored", 3)],
}


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_training_that_moves_between_backends_ends_like_an_unbroken_one(framework: str, tmp_path: Path) -> None:
    """Saved in the middle of an epoch, at an epoch's end, and in the middle of the next; each part on another backend."""
    job, path = JOBS[framework], str(tmp_path / "checkpoint")
    (whole,) = run(job, 1, backend="local", framework=framework, args=(path, True, STEPS, False), timeout=120)
    parts = [4, 2, 1, STEPS - 7]
    for number, ((backend, n), steps) in enumerate(zip(CHAINS[framework], parts)):
        rows = run(job, n, backend=backend, framework=framework, args=(path, number == 0, steps, number < 3), timeout=120)
        compare.same([row["done"] for row in rows], [sum(parts[: number + 1])] * len(rows), "the updates so far on every rank")
        for row in rows:
            compare.same(row["weights"].keys(), rows[0]["weights"].keys(), "the names")
            compare.same([v.tobytes() for v in row["weights"].values()], [v.tobytes() for v in rows[0]["weights"].values()], "the ranks")
    compare.close(rows[0]["weights"], whole["weights"], TOLERANCE, "the weight")
    compare.same(rows[0]["rate"], whole["rate"], "the learning rate")
    assert os.listdir(tmp_path) == ["checkpoint"]


def save_forever(path: str) -> None:
    """Saves again and again; each checkpoint's numbers are all the same, and equal to its extra."""
    import torch

    import unidist

    unidist.init(framework="torch", backend="local")
    model = torch.nn.Linear(200, 200)
    number = 0
    while True:
        number += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        unidist.save(path, model=model, extra=number)
        print(number, flush=True)


def test_a_writer_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Killed at any moment of its saves, it has left the last one that it told of, or the next."""
    path, delays = str(tmp_path / "checkpoint"), random.Random(1)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_resume; test_resume.save_forever({path!r})"
    environ = clean_environment(os.environ) | {"UNIDIST_TRAIN_QUIET": "1"}
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
        assert process.stdout is not None
        told = [process.stdout.readline()]
        time.sleep(delays.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read().split()
        process.wait()
        files = folder.read(path)
        number = json.loads(files[folder.MANIFEST])["extra"]
        assert number in (int(told[-1]), int(told[-1]) + 1)
        for name, array in safetensors.numpy.load(files["model.safetensors"]).items():
            compare.same(array, np.full_like(array, number), name)


def frozen_job(path: str, frozen: bool) -> list[dict[str, Any]]:
    """With an optimizer over what trains, and with one over all parameters."""
    import unidist

    unidist.init(framework="torch")
    return [_frozen_training(f"{path}-{all_parameters}", frozen, all_parameters) for all_parameters in (False, True)]


def _frozen_training(path: str, frozen: bool, all_parameters: bool) -> dict[str, Any]:
    """Three layers, the first frozen or not. Loads if there is a checkpoint, takes a step, saves."""
    import torch

    import unidist

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.5 + number / 8)
    model[0].requires_grad_(not frozen)
    model = unidist.wrap_model(model)
    held = [p for p in model.parameters() if all_parameters or p.requires_grad]
    optimizer = unidist.wrap_optimizer(torch.optim.Adam(held, lr=0.125), model)
    if Path(path).exists():
        unidist.load(path, model=model, optimizer=optimizer)
    steps = {name: float(optimizer.state[p]["step"]) if p in optimizer.state else None for name, p in model.named_parameters()}
    moments = {name: optimizer.state[p]["exp_avg"].numpy().copy() for name, p in model.named_parameters() if p in optimizer.state}
    step = unidist.make_train_step(model, optimizer, lambda outputs, targets: ((outputs - targets) ** 2).mean(1))
    x = np.arange(8.0).reshape(4, 2) / 8
    for batch in unidist.wrap_data((x, x[:, :1]), global_batch_size=4):
        step(batch)
    after = {name: optimizer.state[p]["exp_avg"].numpy().copy() for name, p in model.named_parameters() if p in optimizer.state}
    unidist.save(path, model=model, optimizer=optimizer)
    return {"steps": steps, "moments": moments, "after": after}


def test_unfreezing_shifts_no_state(tmp_path: Path) -> None:
    """Case 37: half frozen, saved, unfrozen in a new job: every state is its own parameter's, the unfrozen ones begin without."""
    path = str(tmp_path / "checkpoint")
    then = run(frozen_job, 2, backend="ddp", framework="torch", args=(path, True), timeout=120)[0]
    now = run(frozen_job, 1, backend="local", framework="torch", args=(path, False), timeout=120)[0]
    names = ["1.weight", "1.bias", "2.weight", "2.bias"]
    for first, second in zip(then, now, strict=True):
        assert sorted(first["after"]) == sorted(second["moments"]) == sorted(names)
        for name in names:
            compare.same(second["moments"][name], first["after"][name], f"the state of {name}")
        assert second["steps"] == {"0.weight": None, "0.bias": None, **dict.fromkeys(names, 1.0)}
        assert sorted(second["after"]) == sorted(["0.weight", "0.bias", *names])
