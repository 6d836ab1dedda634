"""What the NVIDIA kernel module shows in files: GPUs by name, UUID and bus, without the driver's library and without nvidia-ml-py."""

from __future__ import annotations

import re
from pathlib import Path

from unidist.hardware.records import Device, text

ROOT = Path("/")
_PCI = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.[0-9a-fA-F]")


def num_device_files(root: Path = ROOT) -> int:
    """GPUs that have a device file here; under WSL there are none."""
    return sum(1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def driver_version(root: Path = ROOT) -> str | None:
    """The loaded kernel module's version."""
    found = re.search(r"Kernel Module\D*?(?:x86_64|aarch64)?\s+(\d+(?:\.\d+)+)", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else None


def list_gpus(root: Path = ROOT) -> list[Device]:
    """The GPUs that the kernel module drives, in the order of the PCI bus."""
    folders = (root / "proc/driver/nvidia/gpus").glob("*")
    found = sorted((place, folder) for folder in folders if (place := _place(folder.name)) is not None)
    return [_gpu(index, place, _text(folder / "information")) for index, (place, folder) in enumerate(found)]


def bus_id(domain: int, bus: int, device: int) -> str:
    """In nvidia-smi's form, such as 00000000:3B:00.0."""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def _place(name: str) -> tuple[int, int, int] | None:
    found = _PCI.fullmatch(name)
    return (int(found[1], 16), int(found[2], 16), int(found[3], 16)) if found else None


def _gpu(index: int, place: tuple[int, int, int], information: str) -> Device:
    lines = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in information.splitlines())}
    uuid = lines.get("GPU UUID", "")
    return Device(
        index=index,
        name=text(lines["Model"]) if lines.get("Model") else None,
        uuid=text(uuid) if uuid and "?" not in uuid else None,  # question marks until the GPU is used for the first time
        pci_bus_id=bus_id(*place),
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
