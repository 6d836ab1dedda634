"""Does the installed Horovod work? Two workers on this machine sum a tensor, each framework in own processes.

`horovodrun` is not used: it imports every framework first. The workers get the variables that it would set.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unidist.errors import LaunchError

WORKERS = 2

SERVER = f"""
import sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

server = RendezvousServer()
port = server.start()
server.init(get_host_assignments(parse_hosts("localhost:{WORKERS}"), {WORKERS}))
print(port, flush=True)
sys.stdin.read()  # until the parent closes it
"""

# each prints what carried the sum, and fails unless the sum of 1s and 2s is 3s; NCCL wants a GPU for each worker
TORCH_WORKER = """
import torch
import horovod.torch as hvd

hvd.init()
on_gpu = hvd.nccl_built() and torch.cuda.device_count() >= hvd.size()
device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0, device=device), op=hvd.Sum)
if total.tolist() != [3.0] * 3:
    raise SystemExit(f"the sum over both workers is {total.tolist()} and should be [3.0, 3.0, 3.0]")
print("nccl" if on_gpu else "gloo")
hvd.shutdown()
"""

TENSORFLOW_WORKER = """
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
on_gpu = hvd.nccl_built() and len(gpus) >= hvd.size()
tf.config.set_visible_devices(gpus[hvd.local_rank()] if on_gpu else [], "GPU")
total = hvd.allreduce(tf.fill((3,), hvd.rank() + 1.0), op=hvd.Sum)
if total.numpy().tolist() != [3.0] * 3:
    raise SystemExit(f"the sum over both workers is {total.numpy().tolist()} and should be [3.0, 3.0, 3.0]")
print("nccl" if on_gpu else "gloo")
hvd.shutdown()
"""

PROGRAMS = {"torch": TORCH_WORKER, "tensorflow": TENSORFLOW_WORKER}


@dataclass(frozen=True)
class Check:
    """A passed check: what carried the sum ("gloo" or "nccl"), and how long all of it took."""

    framework: str
    transport: str
    seconds: float


def verify(framework: str, timeout: float = 120.0) -> Check:
    """Let two workers sum a tensor with Horovod; LaunchError if one fails, or after `timeout` seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unidist-check-") as folder, rendezvous_port(Path(folder)) as port:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(WORKERS)]
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                workers.append(start_worker(PROGRAMS[framework], worker_environment(rank, port, timeout), log))
            codes = wait(workers, start + timeout)
        finally:
            stop(workers)
        if any(code != 0 for code in codes):
            raise LaunchError(describe_failure(framework, codes, logs, timeout))
        return Check(framework, logs[0].read_text().split()[-1], time.monotonic() - start)


@contextmanager
def rendezvous_port(folder: Path) -> Iterator[int]:
    """Run Horovod's own rendezvous server in a process of its own; the port it listens on."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise LaunchError("Horovod's rendezvous server did not start; its error is above")
        yield int(line)
        # leaving closes the server's stdin, which ends it


def worker_environment(rank: int, port: int, timeout: float) -> dict[str, str]:
    """What `horovodrun` would set for this rank of two on one host; Horovod variables of the caller are left out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    horovod = {
        "RANK": rank,
        "SIZE": WORKERS,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": WORKERS,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "HOSTNAME": "localhost",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": "lo0" if sys.platform == "darwin" else "lo",
        "GLOO_TIMEOUT_SECONDS": int(timeout),
    }
    environment |= {f"HOROVOD_{name}": str(value) for name, value in horovod.items()}
    return environment | {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}


def start_worker(program: str, environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start one worker, its output in `log`, away from the current folder, whose files could hide the frameworks."""
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)


def wait(workers: Sequence["subprocess.Popen[bytes]"], deadline: float) -> list[int | None]:
    """The exit codes once all have ended, one has failed, or the time is over; None for those that still run."""
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes) or None not in codes or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)


def stop(workers: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End the workers that still run."""
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
    for worker in workers:
        worker.wait()


def describe_failure(framework: str, codes: Sequence[int | None], logs: Sequence[Path], timeout: float) -> str:
    """The output of the worker that failed first, or of all that did not end, and one sentence below it."""
    failed = [rank for rank, code in enumerate(codes) if code]
    ranks = failed[:1] or [rank for rank, code in enumerate(codes) if code is None]
    lines = [line for rank in ranks for line in logs[rank].read_text(errors="replace").splitlines()[-10:]]
    end = f"worker {ranks[0]} ended with code {codes[ranks[0]]}" if failed else f"no result after {timeout:.0f} s"
    return "\n".join([*lines, f"the installed Horovod does not work with {framework}: {end}"])
