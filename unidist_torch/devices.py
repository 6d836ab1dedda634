"""Which device a worker uses."""

from __future__ import annotations

import torch

from unidist.launchers.gpus import pick
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
