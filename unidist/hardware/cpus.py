"""The cores and the memory that this process may use: its affinity, and the limits of the container (cgroups 2 and 1) it is in."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroups 1 say "no limit" with a number of this size


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the system doesn't say."""

    total: int | None
    available: int | None


def num_cores(root: Path = ROOT) -> int:
    """Cores that this process may use at a time, at least 1: its affinity, or the container's quota where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def memory(root: Path = ROOT) -> Memory:
    """Of this process's container where it has a limit, else of the machine."""
    total, available = _machine_memory(root)
    for limit, used in _memory_limits(root):
        total = limit if total is None else min(total, limit)
        left = max(limit - used, 0) if used is not None else None
        available = min((value for value in (available, left) if value is not None), default=None)
    return Memory(total, available)


def cpu_name(root: Path = ROOT) -> str | None:
    """The model, as /proc/cpuinfo or the system calls it."""
    found = re.search(r"^model name\s*: (.+)$", _text(root / "proc/cpuinfo"), re.M)
    return (found[1].strip() if found else platform.processor() or platform.machine()) or None


def _quotas(root: Path) -> Iterator[float]:
    """Cores granted by each cgroup from this process's up."""
    for folder in _folders(root, "cpu"):
        granted, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if granted == "":
            granted, period = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if granted.isdigit() and period.isdigit() and int(period) > 0:
            yield int(granted) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int | None]]:
    """(limit, used without what can be dropped at once) of each cgroup that has a limit."""
    for folder in _folders(root, "memory"):
        for limit_name, used_name, droppable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _text(folder / limit_name).strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                used = _text(folder / used_name).strip()
                file_cache = re.search(rf"^{droppable} (\d+)$", _text(folder / "memory.stat"), re.M)
                yield int(limit), int(used) - (int(file_cache[1]) if file_cache else 0) if used.isdigit() else None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and those above it. In a container the path can be the host's, of which only the top is there."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        top = root / "sys/fs/cgroup"
        if controller in controllers.split(","):
            top = next((folder for folder in (top / controller, top / controllers) if folder.is_dir()), top)
        elif controllers:
            continue
        own = top / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder == top or top in folder.parents)


def _machine_memory(root: Path) -> tuple[int | None, int | None]:
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.M))
    if "MemTotal" in lines:
        return int(lines["MemTotal"]) * 1024, int(lines["MemAvailable"]) * 1024 if "MemAvailable" in lines else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    except (AttributeError, ValueError, OSError):
        return None, None


def _text(path: Path) -> str:
    """Empty where there is no such file, or none that may be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
