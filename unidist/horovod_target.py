"""What a Horovod wheel has to fit: this Python's frameworks, the machine, CPU or CUDA; and what its build needs.

No framework is imported: versions come from the packages' metadata, CUDA from the text of a file in them.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from unidist.errors import LaunchError, MissingDependencyError, UnsupportedError
from unidist.horovod_source import VERSION, recipe_revision

# framework, the distributions that bring it, the file that says how it was built, where in it the CUDA version is
FRAMEWORKS = (
    ("torch", ("torch",), "torch/version.py", r"^cuda\b[^=\n]*=\s*'([^']+)'"),
    (
        "tensorflow",
        ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
        "tensorflow/python/platform/build_info.py",
        r"'cuda_version',\s*'([^']+)'",
    ),
)

# what is missing, the programs of which one is enough, the Debian package, the conda-forge package
TOOLS = (
    ("C++ compiler", ("c++", "g++", "clang++"), "g++", "cxx-compiler"),
    ("cmake", ("cmake",), "cmake", "cmake"),
    ("make", ("make",), "make", "make"),
)


@dataclass(frozen=True)
class Framework:
    """A framework of this Python; `cuda` is the CUDA version it was built for, None for a CPU build."""

    name: str
    version: str
    cuda: str | None = None


@dataclass(frozen=True)
class Target:
    """Everything that a compiled Horovod depends on; two equal targets can share a wheel."""

    frameworks: tuple[Framework, ...]
    cuda: str | None = None
    python: str = sys.implementation.cache_tag
    machine: str = sysconfig.get_platform()
    recipe: str = recipe_revision()

    @property
    def flavour(self) -> str:
        return f"cuda{self.cuda}" if self.cuda else "cpu"

    @property
    def key(self) -> str:
        """The name of the wheel's folder in the cache."""
        frameworks = [f"{framework.name}{framework.version}" for framework in self.frameworks]
        return "-".join([VERSION, self.recipe, self.python, self.machine, *frameworks, self.flavour])

    @property
    def local_version(self) -> str:
        """The part after `+` in the wheel's version, so that an installed wheel tells what it was built for."""
        return "unidist" + hashlib.sha256(self.key.encode()).hexdigest()[:10]

    @property
    def version(self) -> str:
        return f"{VERSION}+{self.local_version}"


def find_target(cpu: bool = False) -> Target:
    """The wheel that this Python on this machine needs; `cpu=True` accepts a build without CUDA on a GPU machine."""
    if sys.platform == "win32":
        raise UnsupportedError("Horovod does not build on Windows; on Linux and macOS it does")
    frameworks = find_frameworks()
    return Target(frameworks, choose_cuda(frameworks, gpu=gpu_visible(), nvcc=find_nvcc(), cpu=cpu))


def find_frameworks() -> tuple[Framework, ...]:
    """PyTorch and TensorFlow where the running Python has them; none is an error."""
    found = []
    for name, distributions, build_file, cuda_pattern in FRAMEWORKS:
        distribution = next(filter(None, map(find_distribution, distributions)), None)
        if distribution is not None:
            build = Path(str(distribution.locate_file(build_file)))
            match = re.search(cuda_pattern, build.read_text() if build.exists() else "", re.MULTILINE)
            found.append(Framework(name, distribution.version, match[1] if match else None))
    if not found:
        raise MissingDependencyError(
            f"Horovod is compiled against PyTorch or TensorFlow, and {sys.executable} has neither: "
            "pip install torch, or pip install tensorflow, then again"
        )
    return tuple(found)


def find_distribution(name: str) -> metadata.Distribution | None:
    """The installed distribution of that name, None without it."""
    return next(iter(metadata.distributions(name=name)), None)


def gpu_visible() -> bool:
    """True if the NVIDIA driver is here, or its tool lists a device."""
    if os.path.exists("/dev/nvidiactl"):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60)
    return "GPU " in listed.stdout


def find_nvcc() -> Path | None:
    """The CUDA compiler: of the toolkit that HOROVOD_CUDA_HOME or CUDA_HOME names, on PATH, or in the usual folder."""
    homes = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    named = filter(None, (shutil.which(Path(home, "bin", "nvcc")) for home in homes if home))
    on_path, usual = shutil.which("nvcc"), shutil.which("/usr/local/cuda/bin/nvcc")
    # the one on PATH may be a script that calls another: CMake would look for the toolkit around the script
    alone = on_path and find_toolkit(Path(on_path)) is None
    found = next(named, None) or (usual if alone else on_path) or usual or on_path
    return Path(found) if found else None


def find_toolkit(nvcc: Path) -> Path | None:
    """The folder of the CUDA toolkit around this compiler, None if its headers are not there."""
    home = nvcc.resolve().parents[1]
    headers = [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]  # the second: conda
    return home if headers else None


def choose_cuda(frameworks: Sequence[Framework], *, gpu: bool, nvcc: Path | None, cpu: bool) -> str | None:
    """The CUDA version to build for, None for a CPU build.

    A GPU build is for frameworks built for CUDA, where a GPU is or (an image is being built) the CUDA compiler.
    """
    versions = [framework.cuda for framework in frameworks if framework.cuda]
    if cpu or not versions or not (gpu or nvcc):
        return None
    if len(versions) < len(frameworks):
        kinds = " and ".join(f"{f.name} for {'CUDA ' + f.cuda if f.cuda else 'the CPU only'}" for f in frameworks)
        raise LaunchError(f"{kinds}: one Horovod can't serve both; install the CUDA build of both, or pass --cpu for a CPU build")
    if nvcc is None:
        raise MissingDependencyError(
            "this machine has a GPU, but no nvcc (the CUDA compiler) is on PATH or in $HOROVOD_CUDA_HOME/bin: "
            f"`apt-get install nvidia-cuda-toolkit` on Debian and Ubuntu, or `conda install -c nvidia cuda-toolkit` "
            f"(the frameworks here are built for CUDA {versions[0]}), or pass --cpu for a build without CUDA"
        )
    return versions[0]


def check_tools(path: str | None = None) -> None:
    """Raise MissingDependencyError with one line for each tool that `path` (default: PATH) lacks."""
    lines = [
        f"no {tool} ({' or '.join(programs)} on PATH): `apt-get install {debian}` on Debian and Ubuntu, or "
        f"`conda install -c conda-forge {conda}`"
        for tool, programs, debian, conda in TOOLS
        if not any(shutil.which(program, path=path) for program in named_tool(tool) or programs)
    ]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        version = "python" + platform.python_version().rpartition(".")[0]
        lines.append(f"no Python.h for {sys.executable}: `apt-get install {version}-dev` on Debian and Ubuntu")
    if lines:
        raise MissingDependencyError("\n".join(lines))


def named_tool(tool: str) -> tuple[str, ...]:
    """The program that the environment names for this tool, as conda's compilers and Horovod's own variable do."""
    variable = {"C++ compiler": "CXX", "cmake": "HOROVOD_CMAKE"}.get(tool, "")
    return tuple(os.environ.get(variable, "").split()[:1])
