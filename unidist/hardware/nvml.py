"""What the driver says through NVML, asked by nvidia-ml-py's module `pynvml`: no framework, no CUDA context.

Whatever NVML refuses, a value or all of it, becomes a reason beside what it gave; nothing is raised.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from unidist.hardware.kernel_files import bus_id
from unidist.hardware.nvml_links import read_links
from unidist.hardware.nvml_questions import Questions
from unidist.hardware.records import READINGS, Device, GpuProcess, MigInstance, text

INSTALL = "pip install 'unidist-train[devices]'"
_NO_INSTANCE = 0xFFFFFFFF
_MEMORY = ("memory_total", "memory_used", "memory_free")


@dataclass(frozen=True)
class Reading:
    """One look at all GPUs. reason: why there is none, or why NVML could not be asked. denied: GPUs that this process may not use."""

    devices: list[Device] = field(default_factory=list)
    driver_version: str | None = None
    cuda_version: str | None = None
    reason: str | None = None
    asked: bool = False
    denied: frozenset[int] = frozenset()
    unknown: dict[str, str] = field(default_factory=dict)


def read() -> Reading:
    """All GPUs, with everything that NVML tells about each. NVML is started before and shut down after."""
    try:
        nvml = importlib.import_module("pynvml")
    except (ImportError, SyntaxError) as error:  # the first releases were for Python 2
        absent = getattr(error, "name", None) == "pynvml"
        return Reading(reason=f"nvidia-ml-py is not installed: {INSTALL}" if absent else f"pynvml can't be imported: {error}")
    if not hasattr(nvml, "nvmlInit"):
        return Reading(reason=f"the module pynvml is not nvidia-ml-py's ({getattr(nvml, '__file__', None)}): {INSTALL}")
    questions = Questions(nvml)
    with _started(questions) as started:
        if not started:
            return Reading(reason=_explained(nvml, questions))
        return _read_all(questions)


@contextmanager
def _started(questions: Questions) -> Iterator[bool]:
    """NVML between its start and its end; an NVML that was lost can't be ended any more."""
    questions.ask("nvmlInit", "start")
    started = "start" not in questions.unknown
    try:
        yield started
    finally:
        if started:
            questions.ask("nvmlShutdown", "end")


def _explained(nvml: Any, questions: Questions) -> str:
    """What a refusal to start means, in the words of the machine's owner."""
    reason, code = questions.unknown["start"], questions.codes.get("start")
    meaning = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver here: libnvidia-ml.so.1 was not found",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed, but its kernel module is not loaded",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver's library and its kernel module are of different versions, as after an "
        "update: restart the machine, or load the new module",
        nvml.NVML_ERROR_NO_PERMISSION: "this user may not ask the NVIDIA driver",
    }.get(code)
    return f"{meaning} ({reason})" if meaning else f"the NVIDIA driver does not answer: {reason}"


def _read_all(questions: Questions) -> Reading:
    driver = questions.ask("nvmlSystemGetDriverVersion", "driver_version")
    cuda = questions.ask("nvmlSystemGetCudaDriverVersion", "cuda_version")
    count = questions.ask("nvmlDeviceGetCount", "devices")
    reason = questions.unknown.pop("devices", None)
    if count == 0:
        reason = "the NVIDIA driver is there, but shows no GPU to this process"
    handles: list[Any] = []
    asked: list[Questions] = []
    for index in range(count or 0):
        asked.append(Questions(questions.nvml))
        handles.append(asked[-1].ask("nvmlDeviceGetHandleByIndex", "handle", arguments=(index,)))
    devices = [_device(own, index, handle) for index, (own, handle) in enumerate(zip(asked, handles))]
    return Reading(
        _with_links(questions.nvml, devices, handles),
        driver_version=text(driver) if driver is not None else None,
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda is not None else None,
        reason=reason,
        asked=count is not None,
        denied=frozenset(i for i, own in enumerate(asked) if own.codes.get("handle") == own.nvml.NVML_ERROR_NO_PERMISSION),
        unknown=questions.unknown,
    )


def _with_links(nvml: Any, devices: list[Device], handles: list[Any]) -> list[Device]:
    found = read_links(nvml, handles, [device.pci_bus_id for device in devices])
    return [replace(device, links=links, unknown={**device.unknown, **reasons}) for device, (links, reasons) in zip(devices, found)]


def _device(questions: Questions, index: int, handle: Any) -> Device:
    if handle is None:
        reason = questions.unknown["handle"]
        return Device(index, unknown={name: reason for name in READINGS})

    def ask(function: str, *names: str, more: tuple[Any, ...] = ()) -> Any:
        return questions.ask(function, *names, arguments=(handle, *more))

    pci = ask("nvmlDeviceGetPciInfo", "pci_bus_id")
    rates = ask("nvmlDeviceGetUtilizationRates", "utilization")
    capability = ask("nvmlDeviceGetCudaComputeCapability", "compute_capability")
    enabled = _mig_enabled(questions, handle)
    instances = _instances(questions, handle) if enabled else []
    return Device(
        index,
        name=_text(ask("nvmlDeviceGetName", "name")),
        uuid=_text(ask("nvmlDeviceGetUUID", "uuid")),
        pci_bus_id=bus_id(pci.domain, pci.bus, pci.device) if pci is not None else None,
        **_memory(questions, handle),
        utilization=rates.gpu if rates is not None else None,
        temperature=ask("nvmlDeviceGetTemperature", "temperature", more=(questions.nvml.NVML_TEMPERATURE_GPU,)),
        power_draw=_watts(ask("nvmlDeviceGetPowerUsage", "power_draw")),
        power_limit=_watts(ask("nvmlDeviceGetEnforcedPowerLimit", "power_limit")),
        compute_capability=(capability[0], capability[1]) if capability is not None else None,
        mig_enabled=enabled,
        mig=tuple(instance for _, instance in instances),
        processes=_processes(questions, [part for part, _ in instances] or [handle]),
        unknown=questions.unknown,
    )


def _memory(questions: Questions, handle: Any) -> dict[str, Any]:
    """As nvidia-smi counts it, which leaves what the driver keeps for itself out of "used"; older drivers count that in."""
    version = getattr(questions.nvml, "nvmlMemory_v2", None)
    found = Questions(questions.nvml).ask("nvmlDeviceGetMemoryInfo", arguments=(handle, version)) if version else None
    if found is None:
        found = questions.ask("nvmlDeviceGetMemoryInfo", *_MEMORY, arguments=(handle,))
    return {} if found is None else dict(zip(_MEMORY, (found.total, found.used, found.free)))


def _mig_enabled(questions: Questions, handle: Any) -> bool | None:
    """False on a card that can't be split, and under a driver that knows nothing of it."""
    modes = questions.ask("nvmlDeviceGetMigMode", "mig_enabled", arguments=(handle,))
    if modes is None and questions.not_supported("mig_enabled"):
        return False
    return bool(modes[0]) if modes is not None else None


def _instances(questions: Questions, handle: Any) -> list[tuple[Any, MigInstance]]:
    """(handle, facts) of each compute instance; the numbers have holes."""
    found = []
    for number in range(questions.ask("nvmlDeviceGetMaxMigDeviceCount", "mig", arguments=(handle,)) or 0):
        own = Questions(questions.nvml)
        part = own.ask("nvmlDeviceGetMigDeviceHandleByIndex", arguments=(handle, number))
        if part is not None:
            found.append((part, _instance(own, part)))
    return found


def _instance(questions: Questions, part: Any) -> MigInstance:
    return MigInstance(
        gpu_instance=questions.ask("nvmlDeviceGetGpuInstanceId", "gpu_instance", arguments=(part,)),
        compute_instance=questions.ask("nvmlDeviceGetComputeInstanceId", "compute_instance", arguments=(part,)),
        name=_text(questions.ask("nvmlDeviceGetName", "name", arguments=(part,))),
        uuid=_text(questions.ask("nvmlDeviceGetUUID", "uuid", arguments=(part,))),
        **_memory(questions, part),
        unknown=questions.unknown,
    )


def _processes(questions: Questions, handles: list[Any]) -> tuple[GpuProcess, ...]:
    """Those that compute and those that draw; one that does both is one process. Cards that can't draw have no such list."""
    found: dict[tuple[int, int | None, int | None], GpuProcess] = {}
    for handle in handles:
        computing = questions.ask("nvmlDeviceGetComputeRunningProcesses", "processes", arguments=(handle,))
        drawing = Questions(questions.nvml).ask("nvmlDeviceGetGraphicsRunningProcesses", arguments=(handle,))
        for kind, rows in (("compute", computing), ("graphics", drawing)):
            for process in (_process(questions, row, kind) for row in rows or ()):
                key = (process.pid, process.gpu_instance, process.compute_instance)
                both = key in found and found[key].kind != kind
                found[key] = replace(found[key], kind="compute+graphics") if both else process
    return tuple(sorted(found.values(), key=lambda process: process.pid))


def _process(questions: Questions, row: Any, kind: str) -> GpuProcess:
    def part(name: str) -> int | None:
        number = getattr(row, name, _NO_INSTANCE)
        return None if number == _NO_INSTANCE else int(number)

    name = Questions(questions.nvml).ask("nvmlSystemGetProcessName", arguments=(row.pid,))
    return GpuProcess(row.pid, _text(name), row.usedGpuMemory, kind, part("gpuInstanceId"), part("computeInstanceId"))


def _text(value: str | bytes | None) -> str | None:
    return text(value) if value is not None else None


def _watts(milliwatts: int | None) -> float | None:
    return milliwatts / 1000 if milliwatts is not None else None
