"""Build Horovod for the frameworks of this Python, keep the wheel under ~/.cache/unidist, and install it.

The parts: horovod_target (what the wheel has to fit), horovod_source (what is compiled), horovod_pip (the installer), horovod_verify
(does it work).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unidist.errors import LaunchError
from unidist.hardware.cpus import num_cores
from unidist.horovod_pip import install_missing, pip_command, run_installer
from unidist.horovod_source import (
    CUDA_SETTINGS,
    FRAMEWORK_SWITCHES,
    SETTINGS,
    VERSION,
    apply_edits,
    download,
    unpack,
)
from unidist.horovod_target import Target, check_tools, find_distribution, find_nvcc, find_toolkit

# setuptools stays: from Python 3.12 on it brings the distutils that horovodrun imports
RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "cffi", "packaging", "setuptools")
BUILD_NEEDS = (*RUNTIME_NEEDS, "wheel")
LOG_TAIL = 30
PIP_GIVES_UP = "error: subprocess-exited-with-error"  # below it, pip repeats its command and cleans up
ERROR = re.compile(r"\berror: |CMake Error")
PERCENT = re.compile(rb"\[ *(\d+)%\]")

Report = Callable[[float, int | None], None]  # seconds since the start, percent of the compilation or None before it


def cache_directory(target: Target) -> Path:
    """The folder of this target's wheel and log."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "unidist" / "horovod" / target.key


def find_wheel(target: Target, *directories: Path | None) -> Path | None:
    """The first wheel for this target in the folders given."""
    pattern = f"horovod-{target.version}-*.whl"
    return next((wheel for folder in directories if folder for wheel in sorted(folder.glob(pattern))), None)


def obtain_wheel(target: Target, report: Report, wheel_directory: Path | None = None, on_wait: Callable[[], None] = lambda: None) -> Path:
    """The wheel for `target`, from the cache or `wheel_directory` if one of them has it, else built now.

    `on_wait` is called when another process builds the same wheel. With `wheel_directory` the wheel is put there too.
    """
    given = find_wheel(target, wheel_directory)
    if given:
        return given
    directory = make_folder(cache_directory(target), "set XDG_CACHE_HOME to a folder of yours")
    if wheel_directory:
        make_folder(wheel_directory, "give --wheel-dir a folder of yours")
    with locked(directory / "lock", on_wait):
        wheel = find_wheel(target, directory) or build_wheel(target, directory, report)
    return Path(shutil.copy2(wheel, wheel_directory)) if wheel_directory else wheel


def make_folder(path: Path, advice: str) -> Path:
    """The folder, made if need be; one that can't be written is an error that ends with the advice."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise LaunchError(f"{path} can't be written ({error.strerror}): {advice}") from error
    return path


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the file's lock; the system frees it when the process ends, however it ends."""
    import fcntl  # not at the top: POSIX only, and on Windows the command should say so itself

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_wheel(target: Target, directory: Path, report: Report) -> Path:
    """Compile the wheel (minutes) and move it into `directory`; the log stays there in any case."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    check_tools(path)
    install_missing(BUILD_NEEDS)
    with tempfile.TemporaryDirectory(prefix="unidist-horovod-") as folder:
        temporary = Path(folder)
        source = unpack(download(pip_command(), temporary), temporary)
        apply_edits(source)
        command = [*pip_command(), "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        command += ["--wheel-dir", str(temporary / "wheel"), str(source)]
        environment = build_environment(target, directory) | {"PATH": path}
        run_logged(command, environment, directory / "build.log", report)
        built = find_wheel(target, temporary / "wheel")
        if built is None:
            raise LaunchError(f"pip built no wheel of Horovod {target.version}; its log is {directory / 'build.log'}")
        # moved in two steps, so that an interrupted copy between file systems never looks like a wheel
        partial = Path(shutil.move(built, directory / "wheel.partial"))
        return partial.rename(directory / built.name)


def build_environment(target: Target, directory: Path) -> dict[str, str]:
    """The variables of the build: the user's, without those that would change what is built, and the fixed ones.

    A GPU build finds NCCL through links in `directory`, which stays.
    """
    decided = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU_OPERATIONS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(decided)}
    environment |= SETTINGS | {"HOROVOD_LOCAL_VERSION": target.local_version}
    wanted = {framework.name for framework in target.frameworks}
    for name, switch in FRAMEWORK_SWITCHES.items():
        environment[f"HOROVOD_{'WITH' if name in wanted else 'WITHOUT'}_{switch}"] = "1"
    if target.cuda:
        environment |= CUDA_SETTINGS | cuda_settings(directory)
    environment.setdefault("MAKEFLAGS", f"-j{min(num_cores(), 8)}")
    return environment


def cuda_settings(directory: Path) -> dict[str, str]:
    """Where nvcc and NCCL are: the NCCL that pip installed for the framework if there is one, else the system's."""
    settings: dict[str, str] = {}
    nvcc = find_nvcc()
    toolkit = find_toolkit(nvcc) if nvcc else None
    if toolkit:
        settings |= {"HOROVOD_CUDA_HOME": str(toolkit), "CUDA_HOME": str(toolkit)}  # Horovod's CMake, and PyTorch's part
    nccl = find_nccl()
    if nccl is not None and "HOROVOD_NCCL_HOME" not in os.environ:
        settings |= {"HOROVOD_NCCL_HOME": str(link_nccl(nccl, directory / "nccl")), "HOROVOD_NCCL_LINK": "SHARED"}
        # the built libraries look for it where pip puts it; TensorFlow, unlike PyTorch, has not loaded it before them
        run_path = "-Wl,-rpath,'$ORIGIN/../../nvidia/nccl/lib'"
        settings["LDFLAGS"] = f"{os.environ.get('LDFLAGS', '')} {run_path}".strip()
    return settings


def link_nccl(nccl: Path, home: Path) -> Path:
    """A folder as the build wants it: pip's package has libnccl.so.2 only, and the linker asks for libnccl.so.

    CMake writes this folder into the libraries, as a place to look for NCCL, so it must not be one that others can create.
    """
    shutil.rmtree(home, ignore_errors=True)
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(nccl / "include")
    for name in ("libnccl.so", "libnccl.so.2"):
        (home / "lib" / name).symlink_to(nccl / "lib" / "libnccl.so.2")
    return home


def find_nccl() -> Path | None:
    """The folder of pip's NCCL package, None without it."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        distribution = find_distribution(name)
        if distribution is not None:
            return Path(str(distribution.locate_file("nvidia/nccl")))
    return None


def run_logged(command: Sequence[str], environment: dict[str, str], log: Path, report: Report) -> None:
    """Run to the end, all output in `log`, `report` called twice a second; a failure shows a part of the log."""
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while process.poll() is None:
            report(time.monotonic() - start, compiled_percent(log))
            time.sleep(0.5)
    finally:
        if process.poll() is None:  # interrupted: the compilers go too
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if process.returncode:
        raise LaunchError(f"{log_excerpt(log)}\nbuilding Horovod {VERSION} failed; the whole log is {log}")


def log_excerpt(log: Path) -> str:
    """The first error and what follows it, then the last lines; commands, thousands of characters long, are cut."""
    lines = [line[:200] for line in log.read_text(errors="replace").partition(PIP_GIVES_UP)[0].splitlines()]
    first = next((number for number, line in enumerate(lines[:-LOG_TAIL]) if ERROR.search(line)), None)
    start = [] if first is None else [*lines[first : first + 5], "[...]"]
    return "\n".join(start + lines[-LOG_TAIL:])


def compiled_percent(log: Path) -> int | None:
    """The last percentage that the build printed, None before the first."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 50_000))
        found = PERCENT.findall(file.read())
    return int(found[-1]) if found else None


def is_installed(target: Target) -> bool:
    """True if this Python has the Horovod that was built for exactly this target."""
    distribution = find_distribution("horovod")
    return distribution is not None and distribution.version == target.version


def install_wheel(wheel: Path) -> None:
    """Install the wheel itself, nothing it names as its needs, but the few small packages that it imports."""
    install_missing(RUNTIME_NEEDS)
    run_installer(["--no-deps", str(wheel)])
