"""How many GPUs this process may use, found without a framework and without the driver's library."""

import os
from collections.abc import Mapping
from pathlib import Path

from unidist.hardware.kernel_files import num_device_files
from unidist.hardware.visible import VARIABLE, num_listed


def num_visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """What CUDA_VISIBLE_DEVICES shows of the GPUs that have a device file; without the variable all of them."""
    present = num_device_files(root)
    variable = environ.get(VARIABLE)
    return present if variable is None else num_listed(variable, present)
