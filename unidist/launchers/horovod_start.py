"""Horovod's start without horovodrun: rank 0 serves its rendezvous, and every rank gets the variables that it reads.

Neutral: neither framework is imported, so that both `horovod` backends start this way, under any launcher.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unidist.errors import LaunchError, MissingDependencyError, UnsupportedError
from unidist.frameworks import is_installed

if TYPE_CHECKING:
    from unidist.control import Control
    from unidist.world import World

_PATIENCE = 3.0  # seconds for one of rank 0's names to answer
_STALL_CHECK = 60  # Horovod's own default. A wait ends at the first check after its time; a shutdown time below it is ignored
_GLOO_TIMEOUT = 30  # likewise


@dataclass
class Handle:
    """What `start` started; `stop` after Horovod's own shutdown leaves the environment as it was found."""

    environ: MutableMapping[str, str]
    server: Any = None
    before: dict[str, str | None] = field(default_factory=dict)

    def put(self, values: dict[str, str], *, over: bool = False) -> None:
        """Set variables that are not set; over: those that are, too."""
        for name, value in values.items():
            if over or name not in self.environ:
                self.before.setdefault(name, self.environ.get(name))
                self.environ[name] = value

    def stop(self) -> None:
        """End the rendezvous server and take the variables back."""
        if self.server is not None:
            self.server.stop()
            self.server = None
        for name, value in self.before.items():
            if value is None:
                self.environ.pop(name, None)
            else:
                self.environ[name] = value
        self.before.clear()


def require(framework: str, module: str) -> None:
    """Raise MissingDependencyError unless Horovod is there and its extension for `framework` was built: `module` is its name."""
    import importlib.util

    spec = importlib.util.find_spec("horovod") if is_installed("horovod") else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not any(_extension(folder, framework, module) for folder in folders):
        what = "is not installed" if spec is None else f"was built without {framework}"
        raise MissingDependencyError(f"Horovod {what}; install it with: unidist install horovod")


def _extension(folder: str, framework: str, module: str) -> bool:
    from pathlib import Path

    return any((Path(folder) / framework).glob(f"{module}*.so"))


def adopted_world(hvd: Any, environ: MutableMapping[str, str]) -> World | None:
    """The world of a Horovod that is initialised already (`hvd`: a framework's Horovod module); None when it isn't."""
    from unidist.world import World, read_world

    if not hvd.is_initialized():
        return None
    told = read_world(environ)
    if (told.rank, told.size) == (hvd.rank(), hvd.size()):
        return told
    places = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return World(hvd.rank(), hvd.size(), *places, launcher="an initialised Horovod")


def has_groups(environ: MutableMapping[str, str]) -> bool:
    """Whether Horovod was told to make process sets when it runs already."""
    return environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")


def allow_groups(hvd: Any, handle: Handle | None, world: World, control: Control, timeout: float) -> Handle | None:
    """Start Horovod anew so that it can make process sets, unless it can; every rank must call it, with nothing under way.

    Not from the start: its ranks then compare their process sets in every cycle, which costs each step about a quarter millisecond, also
    in jobs without groups. Raises UnsupportedError for a Horovod that the user initialised without.
    """
    if has_groups(os.environ):
        return handle
    if handle is None:
        raise UnsupportedError(
            "the Horovod that was initialised before unidist.init can make no process sets, and so no groups: set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), or leave hvd.init() to unidist"
        )
    hvd.shutdown()
    handle.stop()
    handle = start(world, control, timeout, os.environ, groups=True)
    with control.waiting("Horovod's start with groups"):
        hvd.init()
    return handle


def start(world: World, control: Control, timeout: float, environ: MutableMapping[str, str], *, groups: bool = False) -> Handle:
    """Prepare `hvd.init()`; every rank must call it. `environ` is `os.environ`, since Horovod's C++ reads the real one.

    Under horovodrun its own rendezvous is used, except for a second start with groups. Raises LaunchError when rank 0's rendezvous
    can't be reached.
    """
    handle = Handle(environ)
    if groups:
        handle.put({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, over=True)
    seconds = max(1, math.ceil(timeout))
    handle.put({
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(seconds),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(min(_STALL_CHECK, max(1, seconds // 4))),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(_GLOO_TIMEOUT, seconds)),
    })  # fmt: skip
    if environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") and not groups:
        return handle
    handle.put({"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"})
    if world.size > 1:
        try:
            handle.put(_variables(world, control, handle), over=groups)
        except BaseException:
            handle.stop()
            raise
    return handle


def _variables(world: World, control: Control, handle: Handle) -> dict[str, str]:
    places = [_Place(*json.loads(row)) for row in control.gather("Horovod's start", json.dumps(_own_place(world)))]
    mine = places[world.rank]
    address = ""
    if world.rank == 0:
        handle.server, port = _serve(places)
        names = ["127.0.0.1"] if world.num_nodes == 1 else _names(handle.environ)
        address = json.dumps([names, port])
    names, port = json.loads(control.broadcast("Horovod's rendezvous", address if world.rank == 0 else None, 0))
    host, own = _reach(names, port)
    # Rank 0's host is known to itself by many addresses: the one that another host reached it by is the one that counts.
    rows = [json.loads(row) for row in control.gather("Horovod's interfaces", json.dumps([mine.node, host, *_own_name()]))]
    if world.num_nodes > 1:
        _check_names(rows, places[0].node)
    if mine.node == places[0].node and world.num_nodes > 1:
        own = next((row[1] for row in rows if row[0] != mine.node), own)
    cross = sorted(p.node for p in places if p.local_rank == mine.local_rank)
    return {
        "HOROVOD_RANK": str(world.rank), "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank), "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(cross.index(mine.node)), "HOROVOD_CROSS_SIZE": str(len(cross)),
        "HOROVOD_HOSTNAME": mine.host, "HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": _interface(own),
    }  # fmt: skip


@dataclass(frozen=True)
class _Place:
    node: int
    local_rank: int
    local_size: int
    host: str


def _own_place(world: World) -> list[Any]:
    # Two hosts may carry one name (network namespaces, containers); the node number tells them apart.
    return [world.node_rank, world.local_rank, world.local_size, f"{socket.gethostname()}-{world.node_rank}"]


def _serve(places: list[_Place]) -> tuple[Any, int]:
    """Horovod's own rendezvous server, told who comes."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    slots = []
    for rank, place in enumerate(places):
        cross = sorted(p.node for p in places if p.local_rank == place.local_rank)
        slots.append(SlotInfo(place.host, rank, place.local_rank, cross.index(place.node), len(places), place.local_size, len(cross)))
    server.init(slots)
    return server, port


def _names(environ: MutableMapping[str, str]) -> list[str]:
    """Names for rank 0's machine, the likeliest first."""
    towards = environ.get("MASTER_ADDR", "") or "192.0.2.1"
    return list(dict.fromkeys(name for name in (_routed(towards), towards, socket.gethostname()) if name and name != "192.0.2.1"))


def _own_name() -> tuple[str, str]:
    """This host's name and the address that it stands for here; "" where it stands for none."""
    name = socket.gethostname()
    try:
        return name, socket.gethostbyname(name)
    except OSError:
        return name, ""


def _check_names(rows: list[list[str]], first_node: int) -> None:
    """Horovod's gloo listens where the host's own name points (HOROVOD_GLOO_IFACE notwithstanding), so the others must reach that.

    Raises LaunchError on all ranks.
    """
    far = any(int(node) != first_node and not host.startswith("127.") for node, host, _, _ in rows)
    bad = sorted({f"{name} ({address or 'unknown'})" for _, _, name, address in rows if not address or address.startswith("127.")})
    if far and bad:
        raise LaunchError(
            f"Horovod listens on the address of its host's own name, which the other hosts can't reach: {', '.join(bad)}; give the name "
            "the host's real address in /etc/hosts"
        )


def _routed(towards: str) -> str:
    """This machine's address on the way to another; "" for the loopback. Sends nothing (UDP)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if own.startswith("127.") else own


def _reach(names: list[str], port: int) -> tuple[str, str]:
    """The first of rank 0's names that answers, as an address, and this machine's own address on that way."""
    problem: OSError | None = None
    for name in names:
        try:
            with socket.create_connection((name, port), timeout=_PATIENCE) as connection:
                return str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError as error:
            problem = error
    raise LaunchError(f"rank 0's rendezvous for Horovod can't be reached at {' or '.join(names)}, port {port}: {problem}") from problem


def _interface(address: str) -> str:
    """The network interface that has an address. Raises LaunchError."""
    import psutil  # type: ignore[import-untyped]  # Horovod needs it itself

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise LaunchError(f"no network interface of {socket.gethostname()} has the address {address}, by which the other ranks reach it")
