"""What `unidist install horovod` compiles: Horovod's last release, with a few edits and fixed settings.

The release is from June 2023 and does not build against today's frameworks as it is. Nobody else's fork is used: its
source distribution is fetched through the user's own pip, unpacked afresh, and changed by the table `EDITS`.
"""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unidist.errors import LaunchError

VERSION = "0.28.1"
FRAMEWORK_SWITCHES = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
SETTINGS = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the minimum that the gloo inside asks for
}
CUDA_SETTINGS = {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL"}


@dataclass(frozen=True)
class Edit:
    """Replace every match of a regular expression in some files of the source; each file must have one."""

    files: tuple[str, ...]
    pattern: str
    replacement: str
    reason: str


EDITS = (
    Edit(
        ("CMakeLists.txt", "horovod/torch/CMakeLists.txt", "horovod/tensorflow/CMakeLists.txt"),
        r"set\(CMAKE_CXX_STANDARD (?:14|17)\)",
        "set(CMAKE_CXX_STANDARD 20)",
        "the headers of current PyTorch and TensorFlow are C++20",
    ),
    Edit(
        ("horovod/tensorflow/CMakeLists.txt",),
        r".*xla_mpi_ops\.cc.*\n",
        "",
        "TensorFlow's wheel lacks a header that this file includes; it serves XLA-compiled steps only",
    ),
    Edit(
        ("horovod/common/gloo/gloo_controller.cc",),
        r"global_ranks_\.reserve\(size_\)",
        "global_ranks_.resize(size_)",
        "with reserve the vector stays empty, and the stall inspector never ends a wait for a missing rank",
    ),
    Edit(
        ("cmake/Modules/FindPytorch.cmake",),
        r"if \(\(torch\.version\.cuda is not None\) and \(CUDA_HOME is not None\)\)",
        "if '$ENV{HOROVOD_GPU_OPERATIONS}' and torch.version.cuda and CUDA_HOME",
        "a CPU build stays one, and builds, where PyTorch knows CUDA and a CUDA compiler happens to be there",
    ),
)


def recipe_revision() -> str:
    """Eight characters that change with any edit or setting, so that a wheel of an older recipe is not taken."""
    recipe = repr((EDITS, SETTINGS, CUDA_SETTINGS))
    return hashlib.sha256(recipe.encode()).hexdigest()[:8]


def apply_edits(root: Path, edits: Sequence[Edit] = EDITS) -> None:
    """Change the unpacked source in `root`; a text that is not found is a LaunchError, and nothing is built."""
    for edit in edits:
        for name in edit.files:
            path = root / name
            text, count = re.subn(edit.pattern, edit.replacement, path.read_text())
            if not count:
                raise LaunchError(
                    f"{name} has no text matching {edit.pattern!r} ({edit.reason}): this is not the source of "
                    f"Horovod {VERSION} that the edit was written for; nothing was built"
                )
            path.write_text(text)


def download(pip: Sequence[str], directory: Path) -> Path:
    """Fetch the source distribution into `directory` through the user's own pip configuration; returns its path."""
    command = [*pip, "download", "--no-deps", "--no-binary=horovod", "--no-build-isolation"]
    command += ["--dest", str(directory), f"horovod=={VERSION}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    archives = sorted(directory.glob("horovod-*.tar.gz"))
    if done.returncode or not archives:
        lines = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise LaunchError(
            f"{lines}\npip could not download the source of Horovod {VERSION}: check pip's index settings, or put "
            f"horovod-{VERSION}.tar.gz into a folder and set PIP_FIND_LINKS to it"
        )
    return archives[0]


def unpack(archive: Path, directory: Path) -> Path:
    """Unpack into `directory`, the source's root is returned; CMake can't configure the same tree twice."""
    shutil.unpack_archive(archive, directory)
    return directory / f"horovod-{VERSION}"
