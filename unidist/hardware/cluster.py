"""The devices of all hosts of a job, put together on every rank from what each rank sees."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from unidist.control import Control
from unidist.hardware.inventory import read_devices
from unidist.hardware.records import Device, Devices, MigInstance
from unidist.world import World, with_hosts

Entry = TypeVar("Entry", Device, MigInstance)


def gather_devices(control: Control, world: World) -> list[Devices]:
    """One `Devices` a host, by the host's lowest rank; every rank must call it."""
    mine = {"node": with_hosts(world, control.hosts).node_rank, **read_devices().to_dict()}
    rows = [json.loads(row) for row in control.gather("devices", json.dumps(mine))]
    hosts: dict[tuple[int, str], list[tuple[int, Devices]]] = {}
    for rank, row in enumerate(rows):
        hosts.setdefault((row["node"], row["host"]["name"]), []).append((rank, Devices.from_dict(row)))
    return [merge_views(views) for views in hosts.values()]


def merge_views(views: list[tuple[int, Devices]]) -> Devices:
    """One host from (rank, what it sees): read by the lowest rank; what only others see (in containers of their own) is added."""
    gpus = [
        replace(gpu, mig=tuple(_union((rank, _parts(found, gpu)) for rank, found in views)))
        for gpu in _union((rank, found) for rank, found in views)
    ]
    return Devices(gpus, replace(views[0][1].host, ranks=tuple(rank for rank, _ in views)))


def _union(views: Iterable[tuple[int, Iterable[Entry]]]) -> list[Entry]:
    """Each entry once, with the number that every rank has for it."""
    known: dict[str, Entry] = {}
    for rank, entries in views:
        for entry in entries:
            mine: Entry = known.setdefault(_key(entry), entry)
            if entry.visible_index is not None:
                known[_key(entry)] = replace(mine, visible_to=(*mine.visible_to, (rank, entry.visible_index)))
    return list(known.values())


def _parts(found: Devices, gpu: Device) -> list[MigInstance]:
    return [part for other in found if _key(other) == _key(gpu) for part in other.mig]


def _key(entry: Device | MigInstance) -> str:
    if entry.uuid is not None:
        return entry.uuid
    if isinstance(entry, Device):
        return entry.pci_bus_id or f"number {entry.index}"
    return f"part {entry.gpu_instance}/{entry.compute_instance}"
