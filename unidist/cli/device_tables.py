"""What `unidist devices` prints of a host: a line about the machine, its GPUs, the links between them, their processes, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from unidist.hardware.records import Device, Devices, Host, Link, MigInstance

UNKNOWN = "?"
_MANY = 8  # of a GPU with more unknown values than that the table says it all


def host_view(found: Devices) -> RenderableType:
    """All of it; tables that would be empty are left out."""
    parts: list[RenderableType] = [Text(line) for line in _host_lines(found)]
    if found:
        parts.append(_gpu_table(found))
    if any(gpu.links for gpu in found):
        parts.append(_link_table(found))
    if any(gpu.processes for gpu in found):
        parts.append(_process_table(found))
    parts += [Text(line, style="dim") for line in reason_lines(found)]
    return Group(*parts, Text())


def _host_lines(found: Devices) -> Iterator[str]:
    host = found.host
    ranks = f" | rank{'s' if len(host.ranks) > 1 else ''} {_ranges(host.ranks)}" if host.ranks else ""
    yield f"{host.name}{ranks} | driver {host.driver_version or UNKNOWN} | CUDA {host.cuda_version or UNKNOWN}{_variable(host)}"
    available = gib(host.memory_available)
    yield (
        f"CPU {host.cpu_name or UNKNOWN} | {host.num_cores} of {host.num_cores_total} cores | memory {available} of "
        f"{gib(host.memory_total)} GiB available"
    )
    if not found:
        yield "no GPUs" + (f": {found.reason}" if found.reason else "")


def _variable(host: Host) -> str:
    return "" if host.cuda_visible_devices is None else f" | CUDA_VISIBLE_DEVICES={host.cuda_visible_devices!r}"


def _gpu_table(found: Devices) -> Table:
    name = Column("name", overflow="fold")  # a UUID is of use only as a whole
    table = Table("GPU", "CUDA", name, "memory GiB", "load", "temp", "power W", "cc", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for gpu in found:
        power = f"{_shown(gpu.power_draw)} of {_shown(gpu.power_limit)}"
        names = _lines(gpu.name, gpu.uuid, gpu.pci_bus_id)
        number, load, temperature = cuda_number(gpu, found.host), _shown(gpu.utilization, " %"), _shown(gpu.temperature, " C")
        table.add_row(str(gpu.index), number, names, _memory(gpu), load, temperature, power, _capability(gpu))
        for part in gpu.mig:
            place = f"{gpu.index} {_shown(part.gpu_instance)}/{_shown(part.compute_instance)}"
            table.add_row(place, cuda_number(part, found.host), _lines(part.name, part.uuid), _memory(part), *[""] * 4)
    return table


def cuda_number(entry: Device | MigInstance, host: Host) -> str:
    """CUDA's number in this process; in a job each rank's, in short where all have the same; "-" where it is hidden."""
    if not host.ranks:
        return "-" if entry.visible_index is None else str(entry.visible_index)
    numbers = {number for _, number in entry.visible_to}
    if len(entry.visible_to) == len(host.ranks) and len(numbers) == 1:
        return str(numbers.pop())
    return "\n".join(f"{_ranges([r for r, n in entry.visible_to if n == number])}: {number}" for number in sorted(numbers)) or "-"


def _link_table(found: Devices) -> Table:
    table = Table("links", *(f"GPU {gpu.index}" for gpu in found), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for gpu in found:
        links = {link.index: link for link in gpu.links}
        table.add_row(f"GPU {gpu.index}", *("" if other is gpu else _link(links.get(other.index)) for other in found))
    return table


def _link(link: Link | None) -> str:
    if link is None:
        return UNKNOWN
    return f"NV{link.num_nvlinks}" if link.num_nvlinks else link.topology or UNKNOWN


def _process_table(found: Devices) -> Table:
    table = Table("GPU", "pid", "process", "memory GiB", "kind", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for gpu in found:
        for process in gpu.processes:
            part = "" if process.gpu_instance is None else f" {process.gpu_instance}/{_shown(process.compute_instance)}"
            table.add_row(f"{gpu.index}{part}", str(process.pid), Text(process.name or UNKNOWN), gib(process.memory), process.kind)
    return table


def reason_lines(found: Devices) -> Iterator[str]:
    """Why what is shown as "?" is not known: a line for each reason, then what was assumed."""
    told: dict[str, list[str]] = {}
    for name, reason in found.host.unknown.items():
        if name != "devices":
            told.setdefault(reason, []).append(name)
    for gpu in found:
        _collect(told, f"GPU {gpu.index}", gpu.unknown)
        for part in gpu.mig:
            _collect(told, f"GPU {gpu.index} {part.gpu_instance}/{part.compute_instance}", part.unknown)
    if found and found.reason is not None:
        told.setdefault(found.reason, [])
    for reason, names in told.items():
        if found or reason != found.reason:
            yield f"{reason}: {'; '.join(names)}" if names else reason
    yield from found.host.notes


def _collect(told: dict[str, list[str]], what: str, unknown: Mapping[str, str]) -> None:
    for reason in dict.fromkeys(unknown.values()):
        names = [name for name, other in unknown.items() if other == reason]
        told.setdefault(reason, []).append(what if len(names) > _MANY else f"{what} {', '.join(names)}")


def gib(size: int | None) -> str:
    """Bytes as GiB with one digit."""
    return UNKNOWN if size is None else f"{size / 2**30:.1f}"


def _memory(entry: Device | MigInstance) -> str:
    return f"{gib(entry.memory_used)} of {gib(entry.memory_total)}"


def _shown(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def _capability(gpu: Device) -> str:
    return UNKNOWN if gpu.compute_capability is None else ".".join(map(str, gpu.compute_capability))


def _lines(first: str | None, *others: str | None) -> Text:
    """Names are the driver's, not markup."""
    return Text("\n").join([Text(first or UNKNOWN), *(Text(other or UNKNOWN, style="dim") for other in others)])


def _ranges(numbers: list[int] | tuple[int, ...]) -> str:
    """Such as 0-3,7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
