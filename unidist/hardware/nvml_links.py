"""The ways between GPUs: NVLinks, straight and through switches, and how far apart two are on the PCI bus."""

from __future__ import annotations

from collections import Counter
from typing import Any

from unidist.hardware.kernel_files import bus_id
from unidist.hardware.nvml_questions import Questions
from unidist.hardware.records import Link

_SWITCH = "switch"
_LEVELS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def read_links(nvml: Any, handles: list[Any], buses: list[str | None]) -> list[tuple[tuple[Link, ...], dict[str, str]]]:
    """For each GPU its way to every other one, and the reason where it is not known.

    buses: each GPU's bus, by which the far ends of NVLinks are told apart. handles: None for a GPU that could not be asked.
    """
    if len(handles) < 2:
        return [((), {})] * len(handles)
    asked = [Questions(nvml) for _ in handles]
    ends = [_far_ends(questions, handle) for questions, handle in zip(asked, handles)]
    found = []
    for mine, questions in enumerate(asked):
        others = [other for other in range(len(handles)) if other != mine]
        found.append((tuple(_link(questions, handles, buses, ends, mine, other) for other in others), questions.unknown))
    return found


def _link(
    questions: Questions, handles: list[Any], buses: list[str | None], ends: list[Counter[str] | None], mine: int, other: int
) -> Link:
    return Link(other, _num_nvlinks(ends[mine], ends[other], buses[other]), _topology(questions, handles[mine], handles[other]))


def _num_nvlinks(mine: Counter[str] | None, theirs: Counter[str] | None, bus: str | None) -> int | None:
    """Straight ones, and what both have to switches, which connect all with all."""
    if mine is None or bus is None:
        return None
    return mine[bus] + min(mine[_SWITCH], theirs[_SWITCH] if theirs is not None else 0)


def _far_ends(questions: Questions, handle: Any) -> Counter[str] | None:
    """How many active NVLinks end where: at a bus, or at a switch. None when the GPU does not say."""
    if handle is None:
        return None
    ends: Counter[str] = Counter()
    for link in range(getattr(questions.nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        active = questions.ask("nvmlDeviceGetNvLinkState", "links", arguments=(handle, link))
        if active is None:
            if questions.codes.get("links") == questions.nvml.NVML_ERROR_INVALID_ARGUMENT:  # past the last
                questions.unknown.pop("links", None)
                return ends
            if not questions.not_supported("links"):
                return None
        elif active:
            ends[_far_end(questions, handle, link)] += 1
    return ends


def _far_end(questions: Questions, handle: Any, link: int) -> str:
    kind = Questions(questions.nvml).ask("nvmlDeviceGetNvLinkRemoteDeviceType", arguments=(handle, link))
    if kind == getattr(questions.nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
        return _SWITCH
    pci = questions.ask("nvmlDeviceGetNvLinkRemotePciInfo", "links", arguments=(handle, link))
    return bus_id(pci.domain, pci.bus, pci.device) if pci is not None else "unknown"


def _topology(questions: Questions, mine: Any, theirs: Any) -> str | None:
    if mine is None or theirs is None:
        return None
    level = questions.ask("nvmlDeviceGetTopologyCommonAncestor", "links", arguments=(mine, theirs))
    return _LEVELS.get(level, str(level)) if level is not None else None
