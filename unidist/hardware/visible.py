"""CUDA_VISIBLE_DEVICES as CUDA reads it: which devices a process sees, and under which number.

The list ends at the first entry that names no device, and an entry that comes twice leaves no device at all. The first entry
decides what the list holds: "GPU-" or "MIG-" at the very beginning makes it one of UUIDs, exact or cut short, and anything
else one of numbers, each read as C's strtol does ("1st" is 1). CUDA's own description:
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html; what it leaves open is read as
torch.cuda reads it (measured with CUDA: https://github.com/pytorch/pytorch/pull/92315). MIG: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from unidist.hardware.records import Device

T = TypeVar("T")
Place = tuple[int, int | None]  # position of the GPU, and of the instance on it where it is split

VARIABLE = "CUDA_VISIBLE_DEVICES"


def read_entries(variable: str) -> list[int] | list[str]:
    """The entries that count, without regard to what devices there are."""
    entries = variable.split(",")
    for prefix in ("GPU-", "MIG-"):
        if variable.startswith(prefix):
            return _until_invalid(entries, lambda entry: entry if entry.startswith(prefix) else None)
    return _until_invalid(entries, _number)


def num_listed(variable: str, num_present: int) -> int:
    """How many devices the list shows, where no more than the number of GPUs is known; 0 for a number that isn't known either.

    UUIDs are taken at their word. Of instances (MIG) a process sees one.
    """
    entries = read_entries(variable)
    if variable.startswith("MIG-"):
        return min(len(entries), 1)
    past = (place for place, entry in enumerate(entries) if isinstance(entry, int) and 0 < num_present <= entry)
    return next(past, len(entries))


def visible_places(variable: str | None, gpus: Sequence[Device]) -> list[Place]:
    """What a process sees, in CUDA's order. variable: None when it is not set. gpus: all GPUs, in the order of the PCI bus.

    A GPU that is split shows its first instance; as soon as there is an instance, CUDA shows that one and nothing else.
    """
    if variable is None:
        chosen: list[Place] = [(position, None) for position in range(len(gpus))]
    else:
        chosen = _until_invalid(read_entries(variable), lambda entry: _find(entry, gpus))
    places = [place for place in (_whole_or_first(place, gpus) for place in chosen) if place is not None]
    return [place for place in places if place[1] is not None][:1] or places


def order_note(environ: Mapping[str, str], gpus: Sequence[Device]) -> str | None:
    """What has to be said where CUDA's numbers can't be told for sure: it puts the fastest GPU first, by a rule it keeps to itself."""
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus if gpu.name is not None}) < 2:
        return None
    if environ.get(VARIABLE, "").startswith(("GPU-", "MIG-")):
        return None
    return (
        "the GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID, so CUDA numbers the fastest first; the numbers shown are those of "
        "the PCI bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID to make them true"
    )


def _until_invalid(entries: Sequence[object], read: Callable[..., T | None]) -> list[T]:
    found: list[T] = []
    for entry in entries:
        value = read(entry)
        if value is None:
            break
        if value in found:
            return []
        found.append(value)
    return found


def _number(entry: str) -> int | None:
    """What strtol makes of it; None where that is no number or a negative one."""
    digits = re.match(r"\s*([+-]?[0-9]+)", entry)
    number = int(digits[1]) if digits else -1
    return number if number >= 0 else None


def _find(entry: int | str, gpus: Sequence[Device]) -> Place | None:
    if isinstance(entry, int):
        return (entry, None) if entry < len(gpus) else None
    if entry.startswith("GPU-"):
        return _only([(position, None) for position, gpu in enumerate(gpus) if (gpu.uuid or "").startswith(entry)])
    names = [(place, name) for place, name in _instance_names(gpus) if name.startswith(entry)]
    exact = [place for place, name in names if name == entry]
    return _only(exact or list(dict.fromkeys(place for place, _ in names)))


def _instance_names(gpus: Sequence[Device]) -> list[tuple[Place, str]]:
    """Each instance under its UUID, and where it differs under the name that drivers before R470 gave it."""
    found: list[tuple[Place, str]] = []
    for position, gpu in enumerate(gpus):
        for number, instance in enumerate(gpu.mig):
            old = f"MIG-{gpu.uuid}/{instance.gpu_instance}/{instance.compute_instance}"
            found += [((position, number), name) for name in {instance.uuid or old, old}]
    return found


def _only(places: list[Place]) -> Place | None:
    """The one place; a name cut so short that it fits several names none."""
    return places[0] if len(places) == 1 else None


def _whole_or_first(place: Place, gpus: Sequence[Device]) -> Place | None:
    position, instance = place
    if instance is not None or not gpus[position].mig_enabled:
        return place
    return (position, 0) if gpus[position].mig else None
