"""The default process group: adopted when the user made it, else brought up through the control plane."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from unidist.control import Control
from unidist.world import World, read_world


def adopted_world() -> World | None:
    """The world of a process group that exists already; local ranks come from the launcher's variables."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    told = read_world(os.environ)
    if (told.rank, told.size) == (rank, size):
        return told
    return World(rank, size, rank, size, launcher="an initialised process group")


def meet(address: str | None) -> str:
    """Rank 0's address over the group that exists."""
    held = [address]
    dist.broadcast_object_list(held, src=0)
    return str(held[0])


def start_group(world: World, control: Control, device: torch.device, timeout: float) -> None:
    """Bring the group up: rank 0 serves torch's store on a free port, which the control plane passes on."""
    limit = datetime.timedelta(seconds=timeout)
    host = control.rank_0_host or "127.0.0.1"
    store = dist.TCPStore(host, 0, world.size, True, limit, wait_for_workers=False) if world.rank == 0 else None
    port = control.broadcast("torch's store", str(store.port) if store is not None else None)
    if store is None:
        store = dist.TCPStore(host, int(port), world.size, False, limit)
    engine = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(engine, store=store, rank=world.rank, world_size=world.size, timeout=limit)
