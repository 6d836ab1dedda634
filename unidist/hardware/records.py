"""What was found, as plain facts. A value that is not known is None, and `unknown` holds the reason under the field's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def text(value: str | bytes) -> str:
    """A name as str, whatever it was made of: what is no UTF-8, or can't be printed, becomes the replacement character."""
    decoded = (value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in decoded)


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU. pid: as the driver counts, so the host's also in a container. memory: in bytes.

    kind: "compute", "graphics" or "compute+graphics". gpu_instance, compute_instance: where the GPU is split (MIG).
    """

    pid: int
    name: str | None
    memory: int | None
    kind: str
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True)
class Link:
    """The way to another GPU. index: the other's. num_nvlinks: NVLinks between the two, through switches too.

    topology: how far apart they are on PCIe, in nvidia-smi's words: "INTERNAL" (one board), "PIX" (one switch), "PXB"
    (several switches), "PHB" (one host bridge), "NODE" (one NUMA node), "SYS" (across the sockets).
    """

    index: int
    num_nvlinks: int | None
    topology: str | None


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU (Multi-Instance GPU) that CUDA sees as a device. Memory in bytes; `visible_index` as in `Device`."""

    gpu_instance: int | None
    compute_instance: int | None
    name: str | None = None
    uuid: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    visible_index: int | None = None
    visible_to: tuple[tuple[int, int], ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Device:
    """One GPU.

    index: nvidia-smi's number, in the order of the PCI bus. visible_index: CUDA's number for it in this process, None when
    CUDA_VISIBLE_DEVICES hides it, or when it is split (then its MIG instances have one). visible_to: in a listing of the whole
    job, (rank, that rank's number for it). memory_*: bytes; what is neither used nor free is the driver's own. utilization:
    percent of the last moments in which something ran. temperature: degrees Celsius. power_*: watts. unknown: field to reason.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    power_draw: float | None = None
    power_limit: float | None = None
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    links: tuple[Link, ...] = ()
    visible_index: int | None = None
    visible_to: tuple[tuple[int, int], ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)


READINGS = tuple(entry.name for entry in fields(Device) if entry.name not in ("index", "mig", "visible_index", "visible_to", "unknown"))


@dataclass(frozen=True)
class Host:
    """The machine that this process runs on, as far as this process may use it.

    ranks: of the job, in a listing of the whole job. cuda_version: the newest that the driver can run. num_cores: what affinity
    and the container's quota allow, of num_cores_total. memory_*: bytes, by the container's limit where it has one.
    cuda_visible_devices: the variable, None when it is not set. notes: what was assumed. unknown: field to reason; "devices"
    where the driver could not be asked.
    """

    name: str
    ranks: tuple[int, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    cuda_visible_devices: str | None = None
    cpu_name: str | None = None
    num_cores: int = 1
    num_cores_total: int = 1
    memory_total: int | None = None
    memory_available: int | None = None
    notes: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict, hash=False)


class Devices(list[Device]):
    """The GPUs of one host by index, and `host`: the machine around them."""

    def __init__(self, devices: Iterable[Device], host: Host) -> None:
        super().__init__(devices)
        self.host = host

    @property
    def reason(self) -> str | None:
        """Why the driver could not be asked, or shows nothing; None where it answered."""
        return self.host.unknown.get("devices")

    @property
    def visible(self) -> list[Device | MigInstance]:
        """What CUDA shows to this process, in CUDA's order: GPUs, or the one part of a GPU that a process can have."""
        entries: list[Device | MigInstance] = [*self, *(part for gpu in self for part in gpu.mig)]
        return sorted((entry for entry in entries if entry.visible_index is not None), key=lambda entry: entry.visible_index or 0)

    def to_dict(self) -> dict[str, Any]:
        """{"host": {...}, "devices": [{...}, ...]}, which `json.dumps` takes as it is."""
        return {"host": asdict(self.host), "devices": [asdict(device) for device in self]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Devices:
        """What `to_dict` gave, also after a way through JSON."""
        return cls([_device(row) for row in values["devices"]], Host(**_tuples(values["host"])))


def _device(row: Mapping[str, Any]) -> Device:
    parts = {
        "mig": tuple(MigInstance(**_tuples(entry)) for entry in row["mig"]),
        "processes": tuple(GpuProcess(**entry) for entry in row["processes"]),
        "links": tuple(Link(**entry) for entry in row["links"]),
    }
    return Device(**(_tuples(row) | parts))


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were, one inside another as well."""
    return {name: _tuple(value) if isinstance(value, (list, tuple)) else value for name, value in row.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(entry) for entry in value) if isinstance(value, (list, tuple)) else value
