"""Several processes of TensorFlow as one cluster: addresses from TF_CONFIG or agreed on here, TensorFlow's server, sums over all.

`tf.distribute.MultiWorkerMirroredStrategy` brings the cluster up: its constructor starts the server and sets up TensorFlow's collective
operations. Models live in a MirroredStrategy of each process all the same. In the scope of the former every variable that is created or
read is a collective of its own, which waits for ever where ranks differ (another model, a metric that one rank reads), and Keras 3 can't
`fit` under it (keras issue 20585).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from unidist import tf_config
from unidist.control import Control
from unidist.errors import LaunchError, MismatchError
from unidist.meeting import own_address
from unidist.world import World

# TensorFlow can start its server once in a process: a second `init` of the same ranks goes on with it.
_running: Cluster | None = None


@dataclass
class Cluster:
    """addresses: of all ranks; strategy: what started it, kept alive; broken: why no collective works any more."""

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

    Raises LaunchError when TensorFlow was used already or runs in another cluster, MismatchError when ranks hold different
    numbers of devices.
    """
    global _running
    held = _running is not None
    with socket.socket() as probe:
        probe.bind(("", 0))
        mine = {
            "devices": num_devices, "port": probe.getsockname()[1], "node": world.node_rank, "own": own_address(control.rank_0_host),
            "rank 0": control.rank_0_host, "told": _told(world), "running": _running.addresses if _running else None,
            "broken": _running.broken if _running else "",
        }  # fmt: skip
        rows = [json.loads(row) for row in control.gather("TensorFlow's cluster", json.dumps(mine))]
    if len({row["devices"] for row in rows}) > 1:
        raise MismatchError(f"every rank must drive as many devices as the others, not {[row['devices'] for row in rows]}")
    if not any(row["running"] for row in rows):
        _running = _start(_addresses(world, rows), world.rank, control)
    elif not held or any(row["running"] != rows[0]["running"] or row["broken"] for row in rows):
        reason = next((row["broken"] for row in rows if row["broken"]), "some of these ranks ran in another job before")
        raise LaunchError(
            f"TensorFlow's cluster can be started once in a process, and can't be used again here ({reason}): start new processes"
        )
    assert _running is not None
    return _running


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
        with control.waiting("the start of TensorFlow's cluster"):
            return Cluster(addresses, rank, tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver))
    except RuntimeError as error:
        raise LaunchError(f"TensorFlow was used before unidist.init, so it can't join other processes; call init first: {error}") from error
    except tf.errors.OpError as error:
        raise LaunchError(f"TensorFlow's server could not be started at {addresses[rank]}: {error.message}") from error
