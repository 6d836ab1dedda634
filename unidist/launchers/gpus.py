"""How many GPUs this process may use, found without a framework and without the driver's library."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from unidist.errors import LaunchError


def num_visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """The entries of CUDA_VISIBLE_DEVICES, else the driver's device files."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    return _usable([entry.strip() for entry in chosen.split(",")])


def pick(local_rank: int, local_size: int, count: int) -> int:
    """The visible device for a worker among `count`. Raises LaunchError with both numbers when there are too few."""
    if count == 1:
        return 0
    if count < local_size:
        raise LaunchError(
            f"this host shows {count} GPUs to {local_size} workers; start {count} workers, or show each worker one GPU of its own "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return local_rank


def _usable(entries: list[str]) -> int:
    """CUDA reads the list up to the first entry that names no device (empty, -1, NoDevFiles)."""
    for number, entry in enumerate(entries):
        if not re.match(r"\d+$|GPU-|MIG-", entry):
            return number
    return len(entries)
