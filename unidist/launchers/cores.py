"""How many CPU cores this process may use: its affinity, or the container's quota when that is less."""

import math
import os
from pathlib import Path


def num_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        granted, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if granted == "max" else max(1, min(cores, math.ceil(int(granted) / int(period))))
