"""Contract 9 with real engines: a rank that is late is named, one that fails ends the job, whoever started it (case 61).

What needs no engine is in tests/launch: exit codes, signals, orphans, the control plane's own rounds. The collectives are in the shipped
checks (9-late-rank).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from field_jobs import Ended, by_hand, mpirun, torchrun, unidist_run

pytest.importorskip("horovod")

MODELS = """
import os, signal, subprocess, sys, time
import numpy as np
import unidist
backend, framework, how = sys.argv[1:4]
folder = os.path.dirname(os.path.abspath(__file__))
x = np.ones((64, 1), "float32")
def build():
    if framework == "torch":
        import torch
        model = unidist.wrap_model(torch.nn.Linear(1, 1))
        return model, unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.01), model), torch.nn.functional.mse_loss
    import keras
    with unidist.scope():
        model = unidist.wrap_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        optimizer = unidist.wrap_optimizer(keras.optimizers.SGD(0.01), model)
    return model, optimizer, keras.losses.MeanSquaredError()
def step_of():
    model, optimizer, loss = build()
    step, batch = unidist.make_train_step(model, optimizer, loss), next(iter(unidist.wrap_data((x, x), global_batch_size=4)))
    step(batch)
    return model, step, batch
"""
_LIMIT = 10.0  # seconds, by the contract

FAILS = (
    MODELS
    + """
unidist.init(backend=backend, framework=framework, timeout=60)
rank = unidist.rank()
model, step, batch = step_of()
if how == "children":
    import torch
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "97"], start_new_session=True)
    loader = iter(torch.utils.data.DataLoader(torch.ones(64, 1), num_workers=2, persistent_workers=True))
    next(loader)
for number in range(20):
    if number == 3 and rank == 1:
        print("FAILS", time.time(), flush=True)
        if how == "exit":
            sys.exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the user's own mistake")
    step(batch)
print("WENT ON", flush=True)
"""
)

LATE = (
    MODELS
    + """
def meet(name):
    open(f"{folder}/{backend}-{framework}-{name}-{rank}", "w").close()
    while not os.path.exists(f"{folder}/{backend}-{framework}-{name}-{1 - rank}"):
        time.sleep(0.02)
def expected(name, call):
    began = time.monotonic()
    try:
        call()
    except unidist.CollectiveTimeoutError as error:
        print("ENDED", name, round(time.monotonic() - began, 2), str(error).splitlines()[0], flush=True)
        return
    print("NO ERROR", name, flush=True)
unidist.init(backend=backend, framework=framework, timeout=60)
rank = unidist.rank()
step_of()
unidist.shutdown()
def backward():
    import torch
    unidist.backward(model(torch.ones(2, 1)).mean())
def engine():
    unidist.all_reduce(np.ones(3, "float32"))
operations = {"training-step": lambda: step(batch), "backward": backward, "all_reduce": engine}
for name, call in operations.items():
    if name == "backward" and framework != "torch":
        continue
    meet(name)
    unidist.init(backend=backend, framework=framework, timeout=3, check=name != "all_reduce")
    model, step, batch = step_of()
    if rank == 0:
        expected(name, call)
    meet(name + "-over")
    unidist.shutdown()
meet("init")
if rank == 0:
    expected("init", lambda: unidist.init(backend=backend, framework=framework, timeout=1.5))
meet("end")
print("END", rank, flush=True)
"""
)

Jobs = dict[str, "Future[Ended]"]
ENGINES = [("ddp", "torch"), ("horovod", "torch"), ("horovod", "tensorflow")]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All of them, started at once and run three at a time."""
    folder = tmp_path_factory.mktemp("failure")
    for name, text in (("fails", FAILS), ("late", LATE)):
        (folder / f"{name}.py").write_text(text)
    fails, late = folder / "fails.py", folder / "late.py"
    found = {f"late {backend} {framework}": unidist_run(late, backend, framework, "late") for backend, framework in ENGINES}
    found["children"] = unidist_run(fails, "ddp", "torch", "children")
    found["by hand: exit"] = by_hand(fails, "ddp", "torch", "exit")
    found["by hand: kill"] = by_hand(fails, "horovod", "tensorflow", "kill")
    found["torchrun"] = torchrun(fails, "horovod", "tensorflow", "exit")
    if shutil.which("mpirun"):
        found["mpirun"] = mpirun(fails, "horovod", "torch", "raise")
    yield found
    for future in found.values():
        future.result()


@pytest.mark.parametrize("backend, framework", ENGINES)
def test_a_late_rank_is_named(jobs: Jobs, backend: str, framework: str) -> None:
    """In the step, in backward, in an engine's collective, at init: rank 0 says within its time who is missing, and starts anew."""
    ended = jobs[f"late {backend} {framework}"].result()
    assert ended.codes == [0], ended.output
    lines = {line.split("ENDED ")[1].split()[0]: line for line in ended.output.splitlines() if "ENDED " in line}
    assert list(lines) == ["training-step", *(["backward"] if framework == "torch" else []), "all_reduce", "init"], ended.output
    for name, line in lines.items():
        seconds = float(line.split(f"ENDED {name} ")[1].split()[0])
        assert seconds < _LIMIT * ended.busy, line
        assert {"init": "unidist.init", "training-step": "the training step" if framework == "tensorflow" else " was given up"}.get(
            name, name
        ) in line
        assert "rank 0 came, rank 1 did not" in line, line


def _over(ended: Ended, *words: str) -> None:
    """The job is over within 10 s of the failure, says why, and left nothing."""
    assert all(word in ended.output for word in words), ended.output
    assert "WENT ON" not in ended.output
    assert ended.since("FAILS") < _LIMIT * ended.busy, ended.output
    assert not ended.left, ended.left


def test_children_of_a_failed_worker_end_with_it(jobs: Jobs) -> None:
    """A loader's workers and a sleeping program below workers that ignore SIGTERM: nothing is left under `unidist run`."""
    ended = jobs["children"].result()
    assert ended.codes == [1]
    _over(ended, "ValueError: the user's own mistake", "rank 1 failed first: exit code 1")


@pytest.mark.parametrize(
    "how, code, words",
    [
        ("exit", 7, "rank 1 ended, without an error, before it came to the end of backward"),
        ("kill", -9, "rank 1"),
    ],
)
def test_the_others_end_by_themselves(jobs: Jobs, how: str, code: int, words: str) -> None:
    """Where nobody watches the workers, the failure of one ends the rest, and they say which it was."""
    ended = jobs[f"by hand: {how}"].result()
    assert ended.codes[1] == code and ended.codes[0] not in (0, None), ended.output
    assert words in ended.outputs[0], ended.outputs[0]
    _over(ended)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_under_launchers_of_others(jobs: Jobs, launcher: str) -> None:
    if launcher not in jobs:
        pytest.skip("Open MPI is not installed")
    ended = jobs[launcher].result()
    assert ended.codes[0] not in (0, None)
    _over(ended, *(["ValueError: the user's own mistake"] if launcher == "mpirun" else []))
