"""Which device a worker uses."""

from __future__ import annotations

import torch

from unidist.errors import LaunchError
from unidist.world import World


def local_device(world: World) -> torch.device:
    """The `local_rank`-th visible GPU; the only one when one is visible; the CPU where there is none.

    Raises LaunchError when a host shows fewer GPUs than it has workers, with both numbers.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    index = pick(world.local_rank, world.local_size, count)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


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
