"""Real engines under the launchers that people use, and engines that were there before: started, adopted, left alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
FOREIGN = ("UNIDIST_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
SINGLE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KERAS_BACKEND")

REPORT = """
import sys, torch, unidist
context = unidist.init(backend=sys.argv[1], framework="torch", timeout=20)
mean = unidist.all_reduce(float(unidist.rank()))
who = f"rank {unidist.rank()} of {unidist.world_size()}, local {unidist.local_rank()}"
print(f"{who}, {context.world.launcher}, {context.backend}, mean {mean}")
unidist.shutdown()
"""

ADOPT = """
import torch, unidist
torch.distributed.init_process_group("gloo")
context = unidist.init(framework="torch", timeout=20)
assert context.backend == "ddp" and unidist.all_reduce(1.0, "sum") == 2.0
unidist.shutdown()
assert torch.distributed.is_initialized(), "the owner's process group was destroyed"
print("adopted", torch.distributed.get_rank())
torch.distributed.destroy_process_group()
"""

ADOPT_HOROVOD = """
import horovod.torch as hvd, unidist
hvd.init()
context = unidist.init(backend="horovod", framework="torch", timeout=20)
assert unidist.all_reduce(1.0, "sum") == 2.0
unidist.shutdown()
assert hvd.is_initialized(), "the owner's Horovod was shut down"
print("adopted", hvd.rank())
"""

FAIL = """
import os, signal, sys, time, torch, unidist
unidist.init(backend=sys.argv[1], framework="torch", timeout=3)
model = unidist.wrap_model(torch.nn.Linear(2, 2))
if unidist.rank() == 1:
    if sys.argv[2] == "raise":
        raise RuntimeError("the user's own mistake")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
model(torch.ones(1, 2)).sum().backward()
print("rank 0 went on")
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def clean(**extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in SINGLE}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def call(command, *, environ=None, timeout=60):
    return subprocess.run(command, capture_output=True, text=True, env=environ or clean(), timeout=timeout)


def together(command, environs, timeout=60):
    """One process per environment, as a launcher would start them; their outputs, all of which must end well."""
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=e) for e in environs]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(outputs)
    return outputs


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_torchrun(script, backend):
    done = call([str(BIN / "torchrun"), "--nproc-per-node", "2", script(REPORT), backend])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2, local {rank}, torchrun, {backend}, mean 0.5" in done.stdout


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_variables_of_pytorchjob(script, backend):
    port = str(free_port())
    environs = [clean(RANK=str(r), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for r in range(2)]
    outputs = together([sys.executable, script(REPORT), backend], environs)
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2, local 0, environment variables, {backend}, mean 0.5" in output


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_variables_of_mpirun(script, backend):
    job = f"prterun-test-{os.getpid()}-{backend}"
    environs = [
        clean(OMPI_COMM_WORLD_RANK=str(r), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK=str(r), OMPI_COMM_WORLD_LOCAL_SIZE="2",
              PMIX_NAMESPACE=job)
        for r in range(2)
    ]  # fmt: skip
    outputs = together([sys.executable, script(REPORT), backend], environs)
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2, local {rank}, mpirun, {backend}, mean 0.5" in output


def test_horovodrun_chooses_horovod(script):
    text = REPORT.replace("backend=sys.argv[1], ", "")
    done = call([str(BIN / "horovodrun"), "-np", "2", sys.executable, script(text)], environ=clean(TF_CPP_MIN_LOG_LEVEL="3"), timeout=90)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2, local 1, horovodrun, horovod, mean 0.5" in done.stdout


def test_a_process_group_that_is_there_is_adopted_and_left(script):
    done = call([str(BIN / "torchrun"), "--nproc-per-node", "2", script(ADOPT)])
    assert done.returncode == 0 and "adopted 0" in done.stdout and "adopted 1" in done.stdout, done.stderr


def test_a_horovod_that_is_there_is_adopted_and_left(script):
    starter = (
        "import os, sys, runpy\n"
        "from unidist.control import connect\nfrom unidist.launchers import horovod_start\nfrom unidist.world import read_world\n"
        "world = read_world(os.environ)\ncontrol = connect(world, os.environ, 20)\n"
        "service = horovod_start.start(world, control, 20, os.environ)\n"
    )
    done = call(
        [sys.executable, "-m", "unidist", "run", "-n", "2", "--backend", "horovod", "--tee", "all", script(starter + ADOPT_HOROVOD)]
    )
    assert done.returncode == 0 and "adopted 0" in done.stdout and "adopted 1" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("backend, how", [("horovod", "raise"), ("ddp", "kill"), ("ddp", "hang"), ("horovod", "hang")])
def test_one_failed_worker_ends_the_job_under_torchrun(script, backend, how):
    """Under another launcher the remaining ranks exit by themselves; no process is left."""
    path = script(FAIL)
    began = time.monotonic()
    job = subprocess.Popen(
        [str(BIN / "torchrun"), "--nproc-per-node", "2", path, backend, how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean()  # noqa: E501
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=45)
    finally:
        job.send_signal(signal.SIGKILL)
    assert job.returncode != 0 and "rank 0 went on" not in output, output
    assert time.monotonic() - began < 40
    left = subprocess.run(["pgrep", "-f", path], capture_output=True, text=True).stdout.split()
    assert not left, f"processes left: {left}"


def test_several_processes_of_a_one_process_backend_are_refused(script):
    done = call([str(BIN / "torchrun"), "--nproc-per-node", "2", script(REPORT), "local"])
    assert done.returncode != 0 and "drives all its devices from one process" in done.stderr
