"""`unidist install horovod` without a build: the edits, the key, what is checked before, the cache, the errors."""

import dataclasses
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unidist import horovod_build, horovod_target
from unidist.cli.install import install_app
from unidist.errors import LaunchError, MissingDependencyError
from unidist.horovod_source import EDITS, SETTINGS, VERSION, Edit, apply_edits
from unidist.horovod_target import Framework, Target, check_tools, choose_cuda, find_frameworks

TORCH = Framework("torch", "2.13.0")
TENSORFLOW = Framework("tensorflow", "2.21.0")
TARGET = Target((TORCH, TENSORFLOW), None, "cpython-311", "linux-x86_64", "r1")
NVCC = Path("/toolkit/bin/nvcc")

SOURCE = {  # the lines of the release that the edits are about
    "CMakeLists.txt": 'set(CMAKE_CXX_STANDARD 14)\nstring(PREPEND GLOO_CMAKE "set(CMAKE_CXX_STANDARD 17)\\n")\n',
    "horovod/torch/CMakeLists.txt": "    set(CMAKE_CXX_STANDARD 14)\n",
    "horovod/tensorflow/CMakeLists.txt": (
        'set(CMAKE_CXX_STANDARD 17)\nlist(APPEND S "mpi_ops.cc")\nlist(APPEND S "xla_mpi_ops.cc")\nset_output_dir()\n'
    ),
    "horovod/common/gloo/gloo_controller.cc": "  global_ranks_.reserve(size_);\n",
    "cmake/Modules/FindPytorch.cmake": "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
}
EDITED = {
    "CMakeLists.txt": 'set(CMAKE_CXX_STANDARD 20)\nstring(PREPEND GLOO_CMAKE "set(CMAKE_CXX_STANDARD 20)\\n")\n',
    "horovod/torch/CMakeLists.txt": "    set(CMAKE_CXX_STANDARD 20)\n",
    "horovod/tensorflow/CMakeLists.txt": ('set(CMAKE_CXX_STANDARD 20)\nlist(APPEND S "mpi_ops.cc")\nset_output_dir()\n'),
    "horovod/common/gloo/gloo_controller.cc": "  global_ranks_.resize(size_);\n",
    "cmake/Modules/FindPytorch.cmake": ("print(True if '$ENV{HOROVOD_GPU_OPERATIONS}' and torch.version.cuda and CUDA_HOME else False)"),
}


def write_source(root: Path) -> None:
    for name, text in SOURCE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def install_fake(site: Path, distribution: str, version: str, file: str = "", text: str = "") -> None:
    """A package as far as metadata and one file go; nothing here imports it."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if file:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)


def no_build(seconds: float, percent: int | None) -> None:
    pytest.fail("a build started")


def test_edits_change_what_they_are_about_and_nothing_else(tmp_path: Path) -> None:
    write_source(tmp_path)
    apply_edits(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in SOURCE} == EDITED


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.replacement or edit.pattern)
def test_an_edit_whose_text_is_gone_raises(tmp_path: Path, edit: Edit) -> None:
    write_source(tmp_path)
    name = edit.files[-1]
    (tmp_path / name).write_text("int main() {}\n")
    with pytest.raises(LaunchError, match=re.escape(name)):
        apply_edits(tmp_path, [edit])


@pytest.mark.parametrize(
    "change",
    [
        {"frameworks": (Framework("torch", "2.13.1"), TENSORFLOW)},
        {"frameworks": (TORCH, Framework("tensorflow", "2.22.0"))},
        {"frameworks": (TORCH,)},
        {"cuda": "13.0"},
        {"python": "cpython-312"},
        {"machine": "linux-aarch64"},
        {"recipe": "r2"},
    ],
    ids=str,
)
def test_the_key_changes_with_everything_that_is_compiled_in(change: dict[str, object]) -> None:
    other = dataclasses.replace(TARGET, **change)  # type: ignore[arg-type]
    assert other.key != TARGET.key
    assert other.version != TARGET.version


def test_the_version_is_the_releases_with_a_valid_local_part() -> None:
    assert re.fullmatch(rf"{re.escape(VERSION)}\+[a-z][a-z0-9]*", TARGET.version)


@pytest.mark.parametrize(
    ("present", "missing"),
    [((), ("g++", "cmake", "make")), (("cmake",), ("g++", "make")), (("c++", "make"), ("cmake",))],
    ids=str,
)
def test_each_missing_tool_is_one_line_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
    for name in present:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(MissingDependencyError) as caught:
        check_tools(str(tmp_path))
    lines = [line for line in str(caught.value).splitlines() if "Python.h" not in line]
    assert len(lines) == len(missing)
    for line, package in zip(lines, missing, strict=True):
        assert f"`apt-get install {package}`" in line
        assert "`conda install -c conda-forge" in line


def test_frameworks_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake(tmp_path, "torch", "9.1+cu130", "torch/version.py", "cuda: Optional[str] = '13.0'\nhip = None\n")
    build_info = "build_info = OrderedDict([('is_cuda_build', False)])"
    install_fake(tmp_path, "tensorflow-cpu", "8.2", "tensorflow/python/platform/build_info.py", build_info)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_frameworks() == (Framework("torch", "9.1+cu130", "13.0"), Framework("tensorflow", "8.2", None))


def test_a_cpu_torch_and_a_cuda_tensorflow_are_read_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake(tmp_path, "torch", "9.1", "torch/version.py", "cuda: Optional[str] = None\nhip = None\n")
    build_info = "OrderedDict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])"
    install_fake(tmp_path, "tensorflow", "8.2", "tensorflow/python/platform/build_info.py", build_info)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [framework.cuda for framework in find_frameworks()] == [None, "12.5.1"]


def test_no_framework_is_exit_code_1_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_target, "FRAMEWORKS", ())
    result = CliRunner().invoke(install_app, ["horovod"])
    assert result.exit_code == 1
    assert "has neither: pip install torch, or pip install tensorflow" in result.output
    assert len(result.output.splitlines()) == 1


def test_a_listed_device_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: Some Model (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert horovod_target.gpu_visible()


def test_nvcc_is_found_in_the_named_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
    assert horovod_target.find_nvcc() == nvcc


def test_a_toolkit_is_known_by_its_headers(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    assert horovod_target.find_toolkit(nvcc) is None  # as around a script that calls the toolkit's nvcc
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert horovod_target.find_toolkit(nvcc) == tmp_path


def test_a_folder_that_cant_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="set XDG_CACHE_HOME"):
        horovod_build.make_folder(tmp_path / "file" / "cache", "set XDG_CACHE_HOME to a folder of yours")


def test_a_gpu_machine_without_nvcc_is_an_error_unless_the_cpu_will_do() -> None:
    cuda_torch = [Framework("torch", "2.13.0", "13.0")]
    with pytest.raises(MissingDependencyError, match=r"no nvcc .*--cpu"):
        choose_cuda(cuda_torch, gpu=True, nvcc=None, cpu=False)
    assert choose_cuda(cuda_torch, gpu=True, nvcc=None, cpu=True) is None


@pytest.mark.parametrize(
    ("cuda", "gpu", "nvcc", "cpu", "expected"),
    [
        ("13.0", True, NVCC, False, "13.0"),
        ("13.0", False, NVCC, False, "13.0"),  # an image is built on a machine without a GPU
        ("13.0", False, None, False, None),  # pip's default PyTorch on a laptop
        ("13.0", True, NVCC, True, None),
        (None, True, NVCC, False, None),
    ],
)
def test_cuda_is_built_for_cuda_frameworks_where_it_can_be_used(
    cuda: str | None, gpu: bool, nvcc: Path | None, cpu: bool, expected: str | None
) -> None:
    assert choose_cuda([Framework("torch", "2.13.0", cuda)], gpu=gpu, nvcc=nvcc, cpu=cpu) == expected


def test_a_cuda_and_a_cpu_framework_on_a_gpu_machine_are_refused() -> None:
    with pytest.raises(LaunchError, match="torch for CUDA 13.0 and tensorflow for the CPU only"):
        choose_cuda([Framework("torch", "2.13.0", "13.0"), TENSORFLOW], gpu=True, nvcc=NVCC, cpu=False)


def test_the_build_gets_the_fixed_settings_and_not_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("MAKEFLAGS", "-j3")
    environment = horovod_build.build_environment(Target((TORCH,)), tmp_path)
    assert environment.items() >= SETTINGS.items()
    assert environment["HOROVOD_WITH_PYTORCH"] == environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert not {"HOROVOD_WITH_MPI", "HOROVOD_WITH_TENSORFLOW", "HOROVOD_GPU_OPERATIONS"} & environment.keys()
    assert environment["MAKEFLAGS"] == "-j3"


def test_a_gpu_build_uses_nccl_from_pips_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    install_fake(site, "nvidia-nccl-cu13", "2.30", "nvidia/nccl/lib/libnccl.so.2", "library")
    (site / "nvidia/nccl/include").mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    environment = horovod_build.build_environment(Target((TORCH,), "13.0"), tmp_path)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert Path(environment["HOROVOD_NCCL_HOME"], "lib", "libnccl.so").read_text() == "library"


def test_a_wheel_that_is_there_is_taken_and_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "wheels"
    cached = horovod_build.cache_directory(TARGET) / f"horovod-{TARGET.version}-cp311-cp311-linux_x86_64.whl"
    cached.parent.mkdir(parents=True)
    cached.write_text("wheel")
    wheel = horovod_build.obtain_wheel(TARGET, no_build, folder)
    assert (wheel.parent, wheel.name, wheel.read_text()) == (folder, cached.name, "wheel")
    cached.unlink()  # as on another machine that was given the folder
    assert horovod_build.obtain_wheel(TARGET, no_build, folder) == wheel
    other = dataclasses.replace(TARGET, frameworks=(TORCH,))
    assert horovod_build.find_wheel(other, folder) is None


def test_a_second_build_waits_for_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    waiting, entered = threading.Event(), threading.Event()

    def second() -> None:
        with horovod_build.locked(path, waiting.set):
            entered.set()

    thread = threading.Thread(target=second)
    with horovod_build.locked(path, lambda: pytest.fail("nobody holds the lock")):
        thread.start()
        assert waiting.wait(10)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


def test_a_failed_build_shows_its_error_and_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    program = (
        "print('[  5%] Building\\nx.cc:1:1: error: no such thing')\n"
        "print('\\n'.join(f'line {i}' for i in range(100)), '\\n[ 45%] Building')\n"
        "raise SystemExit(3)"
    )
    with pytest.raises(LaunchError) as caught:
        horovod_build.run_logged([sys.executable, "-c", program], dict(os.environ), log, lambda *_: None)
    message = str(caught.value).splitlines()
    assert message[0] == "x.cc:1:1: error: no such thing"
    assert "line 99" in "\n".join(message)
    assert "line 60" not in message
    assert message[-1].endswith(str(log))
    assert horovod_build.compiled_percent(log) == 45
