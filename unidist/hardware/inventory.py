"""`unidist.devices`: what this host has, or what all hosts of the job have."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, overload

from unidist.hardware import cpus, kernel_files, nvml
from unidist.hardware.records import READINGS, Device, Devices, Host, text
from unidist.hardware.visible import VARIABLE, Place, order_note, visible_places


@overload
def devices(*, cluster: Literal[False] = False) -> Devices: ...
@overload
def devices(*, cluster: Literal[True]) -> list[Devices]: ...
def devices(*, cluster: bool = False) -> Devices | list[Devices]:
    """The GPUs of this host, a list by index, with `.host`: driver, CPU cores and memory that this process may use.

    Each is a `Device`: index, name, uuid, pci_bus_id, memory_total, memory_used, memory_free (bytes), utilization (percent),
    temperature (degrees Celsius), power_draw, power_limit (watts), compute_capability, mig, processes, links, and visible_index,
    CUDA's number for it in this process. A value that is not known is None, with the reason in `.unknown`; where the driver could
    not be asked at all the reason is `.reason`. `.visible` is what CUDA shows, `.to_dict()` is for JSON. Nothing is raised for
    what is missing, no framework is imported, and no CUDA context is made; it can be called before `init`, and again at any time.

    cluster: a list of these, one for each host of the job in the order of the hosts' lowest ranks (`.host.ranks`); on every rank
    the same, and every rank must call it, after `init`. Raises NotInitializedError before `init`, CollectiveTimeoutError when a
    rank does not come.
    """
    if not cluster:
        return read_devices()
    from unidist.context import current
    from unidist.hardware.cluster import gather_devices

    context = current()
    return gather_devices(context.control, context.world)


def read_devices(environ: Mapping[str, str] | None = None) -> Devices:
    """What `devices()` returns. environ: whose CUDA_VISIBLE_DEVICES counts."""
    environ = os.environ if environ is None else environ
    reading = nvml.read()
    found = reading.devices if reading.asked else _without_nvml(reading.reason or "")
    variable = environ.get(VARIABLE)
    # A container or Slurm can deny GPUs that the driver still counts; CUDA's numbers pass over them.
    denied = [gpu for gpu in found if gpu.index in reading.denied]
    usable = [gpu for gpu in found if gpu.index not in reading.denied]
    numbered = [*denied, *_numbered(usable, visible_places(variable, usable))]
    return Devices(sorted(numbered, key=lambda gpu: gpu.index), _host(reading, variable, order_note(environ, usable)))


def _without_nvml(reason: str) -> list[Device]:
    """What the kernel module's files tell, and for all the rest why NVML doesn't."""
    found = kernel_files.list_gpus()
    return [replace(gpu, unknown={name: reason for name in READINGS if not getattr(gpu, name)}) for gpu in found]


def _numbered(found: list[Device], places: list[Place]) -> list[Device]:
    numbers = {place: number for number, place in enumerate(places)}
    return [
        replace(
            gpu,
            visible_index=numbers.get((position, None)),
            mig=tuple(replace(part, visible_index=numbers.get((position, number))) for number, part in enumerate(gpu.mig)),
        )
        for position, gpu in enumerate(found)
    ]


def _host(reading: nvml.Reading, variable: str | None, note: str | None) -> Host:
    memory = cpus.memory()
    known = {
        "driver_version": reading.driver_version or kernel_files.driver_version(),
        "cuda_version": reading.cuda_version,
        "cpu_name": cpus.cpu_name(),
        "memory_total": memory.total,
        "memory_available": memory.available,
    }
    reasons = reading.unknown if reading.asked else {name: reading.reason or "" for name in ("driver_version", "cuda_version")}
    unknown = {name: reasons.get(name, "this system does not say") for name, value in known.items() if value is None}
    if reading.reason is not None:
        unknown["devices"] = reading.reason
    return Host(
        name=text(socket.gethostname()),
        cuda_visible_devices=None if variable is None else text(variable),
        num_cores=cpus.num_cores(),
        num_cores_total=os.cpu_count() or 1,
        notes=(note,) if note else (),
        unknown=unknown,
        **known,  # type: ignore[arg-type]
    )
