"""Cases 59, 60, 62, 63, 78, 79: how a job starts, and starts again, in one process and under what launchers set.

tests/launch has more of it: ports that are taken, jobs at once, engines that were there before, the stores of other launchers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from field_jobs import Ended, by_hand, unidist_run

from unidist.errors import LaunchError
from unidist.launchers.gpus import num_visible_gpus, pick
from unidist.world import World, read_world

pytest.importorskip("horovod")

CHANGES = """
import sys
framework, *backends = sys.argv[1:]
if framework == "torch":
    import torch
import unidist
unidist.shutdown()  # without init
for backend in backends:
    context = unidist.init(backend=backend, framework=framework, timeout=60)
    assert unidist.init(backend=backend, framework=framework, timeout=60) is context, "the same arguments again are fine"
    for other in ({"backend": "local"} if backend != "local" else {"backend": "horovod"}, {"backend": backend, "timeout": 61}):
        try:
            unidist.init(framework=framework, **{"timeout": 60, **other})
        except RuntimeError as error:
            assert "unidist.shutdown()" in str(error) and repr(backend) in str(error), error
        else:
            raise AssertionError("other arguments were taken")
    total = unidist.all_reduce(1.0 + unidist.rank(), "sum")
    assert total == unidist.world_size() * (unidist.world_size() + 1) / 2, total
    print("RAN", unidist.rank(), unidist.backend(), flush=True)
    unidist.shutdown()
    unidist.shutdown()
    assert not unidist.is_initialized() and unidist.world_size() == 1
"""

DEVICES = """
import tensorflow as tf
import unidist
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.constant(1.0) + 1.0  # TensorFlow's devices are fixed from here on
context = unidist.init(backend="mirrored", framework="tensorflow", num_devices=2)
assert unidist.init(backend="mirrored", framework="tensorflow", num_devices=2) is context
assert unidist.num_replicas() == 2
unidist.shutdown()
try:
    unidist.init(backend="mirrored", framework="tensorflow", num_devices=3)
except unidist.LaunchError as error:
    print("REFUSED", error, flush=True)
unidist.init(backend="mirrored", framework="tensorflow", num_devices=1)
print("ONE", unidist.num_replicas(), flush=True)
"""

PORT = 'import os; print("PORT", os.environ["MASTER_PORT"], flush=True)\n'

Jobs = dict[str, "Future[Ended]"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All of them at once, so that several jobs share this host."""
    folder = tmp_path_factory.mktemp("start")
    for name, text in (("changes", CHANGES), ("devices", DEVICES), ("port", PORT)):
        (folder / f"{name}.py").write_text(text)
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            usual.bind(("", 29500))
            usual.listen()
        except OSError:
            pass  # somebody else has it, which is the situation as well
        found = {
            "torch on two": unidist_run(folder / "changes.py", "torch", "ddp", "horovod", "ddp"),
            "tensorflow on two": unidist_run(folder / "changes.py", "tensorflow", "horovod", "horovod"),
            "torch on one": by_hand(folder / "changes.py", "torch", "ddp", "horovod", "local", n=1),
            "tensorflow on one": by_hand(folder / "changes.py", "tensorflow", "local", "horovod", "mirrored", n=1),
            "devices": by_hand(folder / "devices.py", n=1),
            "port": unidist_run(Path(folder / "port.py")),
        }
        yield found
        for future in found.values():
            future.result()


RUNS = {
    "torch on two": ["ddp", "horovod", "ddp"],
    "tensorflow on two": ["horovod", "horovod"],
    "torch on one": ["ddp", "horovod", "local"],
    "tensorflow on one": ["local", "horovod", "mirrored"],
}


@pytest.mark.parametrize("job", RUNS)
def test_case_59_shut_down_and_init_again_with_another_backend(jobs: Jobs, job: str) -> None:
    """Two jobs at once on one host (60); twice with the same arguments is fine, with others an error."""
    ended = jobs[job].result()
    assert ended.codes == [0], ended.output
    ranks = range(2) if "two" in job else range(1)
    lines = [line.partition("RAN ")[2] for line in ended.output.splitlines() if "RAN " in line]
    for rank in ranks:
        assert [line for line in lines if line.startswith(f"{rank} ")] == [f"{rank} {backend}" for backend in RUNS[job]]


def test_case_60_the_usual_port_is_taken(jobs: Jobs) -> None:
    ended = jobs["port"].result()
    ports = {line.split()[-1] for line in ended.output.splitlines() if "PORT" in line}
    assert ended.codes == [0] and len(ports) == 1 and ports != {"29500"}, ended.output


OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
PYTORCHJOB = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    "environ, world",
    [
        pytest.param(OMPI, World(1, 2, 1, 2, 0, 1, "mpirun"), id="Open MPI"),
        pytest.param(
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            World(1, 2, 0, 1, 1, 2, "mpirun"),
            id="two hosts",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, World(1, 2, 0, 1, 1, 2, "mpiexec"), id="PMI"
        ),
        pytest.param(PYTORCHJOB, World(3, 4, 0, 1, 3, 4, "environment variables"), id="79: PyTorchJob"),
    ],
)
def test_cases_62_and_79_the_right_triple(environ: dict[str, str], world: World) -> None:
    """The local rank is never taken from the global one."""
    assert read_world(environ) == world


@pytest.mark.parametrize(
    "environ, name",
    [
        *(({key: value for key, value in OMPI.items() if key != gone}, gone) for gone in list(OMPI)[1:]),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({**PYTORCHJOB, "RANK": ""}, "RANK"),
        ({**PYTORCHJOB, "RANK": "x"}, "RANK"),
        ({**PYTORCHJOB, "WORLD_SIZE": "four"}, "WORLD_SIZE"),
        *(({key: value for key, value in PYTORCHJOB.items() if key != gone}, gone) for gone in PYTORCHJOB),
    ],
)
def test_case_62_what_is_missing_or_bad_is_named(environ: dict[str, str], name: str) -> None:
    with pytest.raises(LaunchError, match=name):
        read_world(environ)


def test_case_63_logical_devices_that_are_there(jobs: Jobs) -> None:
    """They are used when the number fits; else the error says why there can't be more."""
    ended = jobs["devices"].result()
    assert ended.codes == [0] and "ONE 1" in ended.output, ended.output
    refused = next(line for line in ended.output.splitlines() if line.startswith("REFUSED"))
    assert "3 devices" in refused and "2 logical CPUs" in refused and "before unidist.init" in refused


def test_case_78_one_visible_gpu_per_worker(tmp_path: Path) -> None:
    """As Slurm's --gpus-per-task=1 and device plugins leave it: device 0 for each; too few are an error with both numbers."""
    for local_rank in range(4):
        visible = num_visible_gpus({"CUDA_VISIBLE_DEVICES": str(local_rank)}, tmp_path)
        assert (visible, pick(local_rank, 4, visible)) == (1, 0)
        assert pick(local_rank, 4, num_visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, tmp_path)) == local_rank
        with pytest.raises(LaunchError, match="2 GPUs to 4 workers"):
            pick(local_rank, 4, num_visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path))
