"""How many GPUs this process may use, found without a framework and without the driver's library."""

import os
from collections.abc import Mapping
from pathlib import Path

from unidist.errors import LaunchError
from unidist.hardware.kernel_files import num_device_files
from unidist.hardware.visible import VARIABLE, num_listed


def num_visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """What CUDA_VISIBLE_DEVICES shows of the GPUs that have a device file; without the variable all of them."""
    present = num_device_files(root)
    variable = environ.get(VARIABLE)
    return present if variable is None else num_listed(variable, present)


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
