"""How ranks find each other: torchrun's own store, horovodrun's, MPI's job name on one host, plain variables."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unidist import httpstore

SCRIPT = """
import os, sys, time
from unidist.control import connect
from unidist.world import read_world
world = read_world(os.environ)
if os.environ.get("LATE") == str(world.rank):
    time.sleep(1.0)
if os.environ.get("ABSENT") == str(world.rank):
    sys.exit(0)
for _ in range(2):
    control = connect(world, os.environ, 4.0)
    rows = control.gather("row", f"{world.rank}/{world.size}")
    control.close()
print("ROWS", *rows, world.launcher, flush=True)
assert not {"torch", "tensorflow", "numpy"} & set(sys.modules)
"""
AGAIN = SCRIPT.replace("    control.close()\n", "    os._exit(5) if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else control.close()\n")
DIES = """
import os, signal, subprocess, sys, time
from unidist.control import connect
from unidist.world import read_world
signal.signal(signal.SIGTERM, signal.SIG_IGN)
control = connect(read_world(os.environ), os.environ, 30.0)
if control.rank == int(os.environ["VICTIM"]):
    time.sleep(0.5)
    print("KILLED", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
witness = "import sys, time; sys.stdin.read(); print('ENDED', time.time())"
subprocess.Popen([sys.executable, "-c", witness], stdin=subprocess.PIPE, start_new_session=True)
with control.waiting("all_reduce"):
    time.sleep(60)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(script: str, environs: list[dict[str, str]]) -> list["subprocess.Popen[str]"]:
    return [
        subprocess.Popen([sys.executable, script], env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for own in environs
    ]


def finish(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=45)
        found.append((process.returncode, out, err))
    return found


def seconds_between(out: str) -> float:
    """From the death of the killed rank to the end of the other one."""
    times = dict(line.split() for line in out.splitlines())
    return float(times["ENDED"]) - float(times["KILLED"])


def mpi(rank: int, size: int, job: str) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in names.items()} | {"PMIX_NAMESPACE": job}


def plain(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


Jobs = dict[str, list["subprocess.Popen[str]"]]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What mostly waits or imports torch, started together."""
    folder = tmp_path_factory.mktemp("slow")
    for name, text in (("meets", SCRIPT), ("dies", DIES), ("again", AGAIN)):
        (folder / f"{name}.py").write_text(text)
    meets, dies, again = (str(folder / f"{name}.py") for name in ("meets", "dies", "again"))

    def torchrun(*arguments: str) -> "subprocess.Popen[str]":
        command = [*TORCHRUN, "--standalone", *arguments]
        return subprocess.Popen(command, env=os.environ | {"VICTIM": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    ports = [free_port(), free_port()]
    return {
        "torchrun": [torchrun(meets), torchrun(meets)],
        "restart": [torchrun("--max-restarts", "1", again)],
        "dies": [torchrun(dies)],
        "server dies": start(dies, [mpi(rank, 2, f"killed-{os.getpid()}") | {"VICTIM": "0"} for rank in range(2)]),
        "absent 0": start(meets, [plain(rank, 2, ports[0]) | {"ABSENT": "0"} for rank in range(2)]),
        "absent 1": start(meets, [plain(rank, 2, ports[1]) | {"ABSENT": "1"} for rank in range(2)]),
    }


def test_mpi_jobs_on_one_host(script: str) -> None:
    """Three ranks whose first one is late; another job at the same time."""
    jobs = [[mpi(rank, 3, f"job-{name}-{os.getpid()}") | {"LATE": "0"} for rank in range(3)] for name in "ab"]
    processes = [start(script, job) for job in jobs]
    for job in processes:
        for code, out, err in finish(job):
            assert (code, out) == (0, "ROWS 0/3 1/3 2/3 mpirun\n"), err


def test_srun_on_one_host(script: str) -> None:
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    ranks = [step | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    assert [(code, out) for code, out, _ in finish(start(script, ranks))] == [(0, "ROWS 0/2 1/2 srun\n")] * 2


def test_plain_variables(script: str) -> None:
    """As under PyTorchJob: rank 1 comes first, and waits for rank 0 to listen on MASTER_PORT."""
    port = free_port()
    for code, out, err in finish(start(script, [plain(rank, 2, port) | {"LATE": "0"} for rank in range(2)])):
        assert (code, out) == (0, "ROWS 0/2 1/2 environment variables\n"), err


def test_two_hosts(script: str, two_hosts: list[list[str]]) -> None:
    """Plain variables across a real network; the first host calls itself localhost, as PyTorchJob's master does."""
    environs = [plain(rank, 2, 23456) | {"MASTER_ADDR": address} for rank, address in enumerate(("localhost", "10.77.8.1"))]
    processes = [
        subprocess.Popen([*inside, sys.executable, script], env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for inside, own in zip(two_hosts, environs)
    ]
    for code, out, err in finish(processes):
        assert (code, out) == (0, "ROWS 0/2 1/2 environment variables\n"), err


def test_a_taken_master_port_is_named_at_once(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begin = time.monotonic()
        ((code, _, err),) = finish(start(script, [plain(0, 2, port)]))
    assert code == 1 and "LaunchError" in err and f"port {port}" in err
    assert time.monotonic() - begin < 3.0


HOROVOD_STORE = """
import sys
from horovod.runner.http.http_server import RendezvousServer
server = RendezvousServer()
print(server.start(), flush=True)
server.init([])
sys.stdin.read()
server.stop()
"""


def test_horovodruns_store(script: str) -> None:
    """The real server of horovodrun, workers with its variables on two hosts' worth of local ranks."""
    pytest.importorskip("horovod")
    store = subprocess.Popen([sys.executable, "-c", HOROVOD_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert store.stdout is not None
        port = int(store.stdout.readline())
        assert httpstore.get("127.0.0.1", port, "/unidist/9") is None
        common = {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_SIZE": "2"}
        common |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port), "HOROVOD_HOSTNAME": "localhost"}
        ranks = [common | {"HOROVOD_RANK": str(rank), "HOROVOD_CROSS_RANK": str(rank)} for rank in range(2)]
        for code, out, err in finish(start(script, ranks)):
            assert (code, out) == (0, "ROWS 0/2 1/2 horovodrun\n"), err
    finally:
        store.communicate(timeout=10)


def test_a_job_of_one_needs_nobody(script: str) -> None:
    ((code, out, _),) = finish(start(script, [{}]))
    assert (code, out) == (0, "ROWS 0/1 python\n")


def test_a_rank_that_never_comes_is_named(slow: Jobs) -> None:
    for absent, words in ((0, "waited 4 s in unidist.init for rank 0"), (1, "rank 0 came, rank 1 did not")):
        code, _, err = finish(slow[f"absent {absent}"])[1 - absent]
        assert code == 1 and "CollectiveTimeoutError" in err and words in err


def test_the_others_end_when_rank_0_is_killed(slow: Jobs) -> None:
    """Under mpirun, rank 0 serves the control plane: rank 1 learns of its death by the broken connection."""
    (first, killed, _), (second, ended, err) = finish(slow["server dies"])
    assert (first, second) == (-signal.SIGKILL, 83)
    assert seconds_between(killed + ended) < 10.0
    assert "rank 0, which serves the control plane, is gone; rank 1 was in all_reduce" in err


def test_torchrun(slow: Jobs) -> None:
    """Through torchrun's store, twice in one process, without importing torch; two jobs at once stay apart."""
    for code, out, err in finish(slow["torchrun"]):
        assert code == 0, err
        assert out.splitlines() == ["ROWS 0/2 1/2 torchrun"] * 2


def test_a_restart_by_torchrun_does_not_read_the_old_address(slow: Jobs) -> None:
    """The first round of workers leaves its address in the store and dies; the second meets anew."""
    ((code, out, err),) = finish(slow["restart"])
    assert code == 0, err
    assert out.splitlines() == ["ROWS 0/2 1/2 torchrun"] * 2


def test_the_rest_of_a_torchrun_job_ends_by_itself(slow: Jobs) -> None:
    """A killed rank ends the job, non-zero, though the other one is stuck in an engine and ignores SIGTERM."""
    ((code, out, err),) = finish(slow["dies"])
    assert code != 0
    assert "rank 1 failed: its process died" in err and "rank 0 was in all_reduce" in err
    assert seconds_between(out) < 10.0
