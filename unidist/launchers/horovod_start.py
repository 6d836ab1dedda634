"""Horovod's own variables and rendezvous, for jobs that `horovodrun` did not start: rank 0 serves, the control plane tells where."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from unidist.control import Control
from unidist.launchers.serving import interface_of, serving_host
from unidist.world import World


class Service:
    """Rank 0's rendezvous server, or nothing."""

    def __init__(self, server: Any = None) -> None:
        self._server = server

    def stop(self) -> None:
        """End the server; Horovod must be shut down before."""
        if self._server is not None:
            self._server.stop()
            self._server = None


def start(world: World, control: Control, timeout: float, environ: MutableMapping[str, str]) -> Service:
    """Set what `hvd.init()` reads; every rank calls it. Variables that `horovodrun` set stay as they are.

    A rank that does not come to an operation within `timeout` seconds then raises on the others (see docs/install-horovod.md).
    """
    environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, round(timeout / 2))))
    environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(max(1, round(timeout))))
    environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(max(1, round(timeout))))
    if world.launcher == "horovodrun":
        return Service()
    server, place = _serve(world) if world.rank == 0 else (None, None)
    host, _, port = control.broadcast("horovod's rendezvous", place).rpartition(":")
    told = {
        "RANK": world.rank, "SIZE": world.size, "LOCAL_RANK": world.local_rank, "LOCAL_SIZE": world.local_size,
        "CROSS_RANK": world.node_rank, "CROSS_SIZE": world.num_nodes, "HOSTNAME": _node(world.node_rank, world),
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_RENDEZVOUS_ADDR": host, "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": environ.get("HOROVOD_GLOO_IFACE") or interface_of(host) or "lo",
    }  # fmt: skip
    environ.update({f"HOROVOD_{name}": str(value) for name, value in told.items()})
    return Service(server)


def _serve(world: World) -> tuple[Any, str]:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    each, extra = divmod(world.size, world.num_nodes)
    hosts = ",".join(f"{_node(node, world)}:{each + (node < extra)}" for node in range(world.num_nodes))
    server.init(get_host_assignments(parse_hosts(hosts), world.size))
    return server, f"{serving_host(world)}:{port}"


def _node(number: int, world: World) -> str:
    """A name for a host that is the same on all ranks; Horovod compares it, nobody connects to it."""
    return "localhost" if world.num_nodes == 1 else f"node{number}"
