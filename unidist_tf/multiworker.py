"""Several processes of TensorFlow as one cluster: addresses from TF_CONFIG or agreed on here, TensorFlow's server, sums over all.

`tf.distribute.MultiWorkerMirroredStrategy` brings the cluster up: its constructor starts the server and sets up TensorFlow's collective
operations. Models live in a MirroredStrategy of each process all the same. In the scope of the former every variable that is created or
read is a collective of its own, which waits for ever where ranks differ (another model, a metric that one rank reads), and Keras 3 can't
`fit` under it (keras issue 20585).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from unidist import tf_config
from unidist.control import Control
from unidist.errors import LaunchError, MismatchError
from unidist.meeting import own_address
from unidist.world import World

_PATIENCE = 5.0  # seconds for another rank's machine to answer
_START = 120.0  # seconds for the start of all servers, when all ranks are there

# TensorFlow can start its server once in a process: a second `init` of the same ranks goes on with it.
_running: Cluster | None = None


@dataclass
class Cluster:
    """addresses: of all ranks; strategy: what started it, kept alive; broken: why it can't be used any more, "" while it can."""

    addresses: list[str]
    rank: int
    strategy: Any
    broken: str = ""

    @property
    def task(self) -> str:
        """How the names of this process's devices begin."""
        return f"/job:worker/replica:0/task:{self.rank}/"


def join(world: World, control: Control, num_devices: int) -> Cluster:
    """The cluster of all ranks, with TensorFlow's server running in each; every rank must call it before TensorFlow is used.

    Raises on all ranks: LaunchError when TensorFlow was used on one already or runs there in another cluster, when a port is taken or
    can't be reached; MismatchError when ranks hold different numbers of devices.
    """
    global _running
    told, held = _told(world), _running
    with _listener(_port(told[world.rank]) if told and held is None else 0) as (port, problem):
        mine = {
            "devices": num_devices, "port": port, "node": world.node_rank, "own": own_address(control.rank_0_host), "told": told,
            "rank 0": control.rank_0_host, "running": held.addresses if held else None,
            "problem": problem or (held.broken if held else _used()),
        }  # fmt: skip
        rows = _gathered(control, "TensorFlow's cluster", mine)
        if len({row["devices"] for row in rows}) > 1:
            raise MismatchError(f"every rank must drive as many devices as the others, not {[row['devices'] for row in rows]}")
        _check(row["problem"] for row in rows)
        if held is not None or any(row["running"] for row in rows):
            others = any(row["running"] != rows[0]["running"] for row in rows)
            _check([f"{_ONCE}, and some of these ranks ran in another job before: start new processes" if others else ""])
        else:
            addresses = _addresses(world, rows)
            _check(_gathered(control, "TensorFlow's network", _unreachable(addresses, world.rank)))
    if held is None:
        held = _running = _start(addresses, world.rank, control)
    return held


_ONCE = "TensorFlow's cluster can be started once in a process"


def _gathered(control: Control, name: str, value: Any) -> list[Any]:
    return [json.loads(row) for row in control.gather(name, json.dumps(value))]


def _check(problems: Iterable[str]) -> None:
    """Raise LaunchError with the first problem that there is."""
    found = next((f"{problem} (rank {rank})" for rank, problem in enumerate(problems) if problem), None)
    if found is not None:
        raise LaunchError(found)


def _used() -> str:
    if context.context()._context_handle is None:
        return ""
    return "TensorFlow was used before unidist.init (an operation, or a list of devices), so it can't join other processes: call init first"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def _listener(port: int) -> Iterator[tuple[int, str]]:
    """Holds a port, a free one for 0, which TensorFlow's server gets at the end: (port, what is wrong with it)."""
    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        yield port, f"TensorFlow's server can't listen on port {port} ({error}), which TF_CONFIG names: choose a free one"
        return
    with server:
        yield server.getsockname()[1], ""


def _unreachable(addresses: list[str], rank: int) -> str:
    """What is wrong on the way to rank 0 and to the next rank: TensorFlow itself would wait for them without limit."""
    for other in {0, (rank + 1) % len(addresses)} - {rank}:
        host, _, port = addresses[other].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
        except OSError as error:
            return f"rank {other} can't be reached at {addresses[other]}: {error}"
    return ""


def _told(world: World) -> list[str] | None:
    """The addresses of TF_CONFIG when it describes this job, not an outer one."""
    cluster = tf_config.read(os.environ)
    if cluster is None or (cluster.rank, len(cluster.addresses)) != (world.rank, world.size):
        return None
    return list(cluster.addresses)


def _addresses(world: World, rows: Sequence[dict[str, Any]]) -> list[str]:
    told = rows[0]["told"]
    if told and all(row["told"] == told for row in rows):
        return list(told)
    return [f"{_bracketed(_host(world, rows, row))}:{row['port']}" for row in rows]


def _host(world: World, rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> str:
    """The address by which the other ranks reach this one: on rank 0's host the one by which they reached that."""
    if world.num_nodes == 1:
        return "127.0.0.1"
    if row["node"] == rows[0]["node"]:
        return str(next((other["rank 0"] for other in rows if other["node"] != row["node"]), row["rank 0"]))
    return str(row["own"] or row["rank 0"])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _start(addresses: list[str], rank: int, control: Control) -> Cluster:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=rank, rpc_layer="grpc"
    )
    try:
        # The constructor holds Python's lock while it waits for the others, so that no thread of ours could end it.
        with control.waiting("the start of TensorFlow's cluster"), _bounded(min(control.timeout, _START)):
            return Cluster(addresses, rank, tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver))
    except (RuntimeError, tf.errors.OpError) as error:
        raise LaunchError(f"TensorFlow's server could not be started at {addresses[rank]}: {error}") from error


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Ends this process, with its stack, when it is not through in time."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
