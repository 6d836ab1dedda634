"""A backend outside the tree, installed from its own project, is found by its entry point and passes the shipped checks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unidist.testing.jobs import clean_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python sees the backend as installed; pip works on a copy, since it writes beside the source."""
    source, target = tmp_path_factory.mktemp("source") / "relay", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    environ = clean_environment(os.environ)
    return environ | {"PYTHONPATH": os.pathsep.join([str(target), environ["PYTHONPATH"]])}


def call(environment: dict[str, str], *arguments: str, timeout: float = 300.0) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", *arguments], env=environment, cwd=EXAMPLE, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


def test_it_passes_the_contract(environment: dict[str, str]) -> None:
    code, output = call(environment, "unidist", "test", "torch/relay", "-n", "2")
    assert code == 0, output
    assert "FAILED" not in output and "refused" in output


def test_it_is_listed(environment: dict[str, str]) -> None:
    code, output = call(environment, "unidist", "backends")
    assert code == 0 and "torch/relay" in output, output


def test_its_own_pytest_file_collects_a_test_for_each_check(environment: dict[str, str]) -> None:
    code, output = call(environment, "pytest", "--collect-only", "-p", "no:cacheprovider", "test_contract.py")
    assert code == 0 and "test_relay[1-steps-mlp-sgd-uneven]" in output, output


ENTRY = """
from unidist.registry import Entry
ENTRY = Entry("torch", "broken", "broken_backend:Broken", requires=("torch",), install="")
"""
BACKEND = """
import os, time
from unidist_relay.backend import Relay
class Broken(Relay):
    name = "broken"
"""


def broken(environment: dict[str, str], folder: Path, body: str, *arguments: str) -> tuple[int, str]:
    """What `unidist test` says of the backend with something changed."""
    info = folder / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[unidist.backends]\nbroken = broken_entry:ENTRY\n")
    (folder / "broken_entry.py").write_text(ENTRY)
    (folder / "broken_backend.py").write_text(BACKEND + body)
    path = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    return call(environment | {"PYTHONPATH": path}, "unidist", "test", "torch/broken", "-n", "2", *arguments)


def test_a_broken_promise_fails(environment: dict[str, str], tmp_path: Path) -> None:
    """A backend that declares to refuse what it does, and does not declare what it refuses, fails both points."""
    body = "    refuses = {4: 'no clipping'}\n"
    code, output = broken(environment, tmp_path, body, "--only", "4-clip-norm", "--only", "6-synchronised-even")
    assert code == 1, output
    assert "declares that it refuses this point (no clipping)" in output
    assert "torch/broken has no synchronised BatchNorm" in output


CLIP = """
    def _clip(self, optimizer, **bounds):
        if self.world.rank == 1:
            {what}
        return super()._clip(optimizer, **bounds)
"""
TWO = ("--only", "3-accumulate-whole-windows", "--only", "4-clip-norm", "--only", "5-frozen-first")


def test_a_crash_fails_the_check_and_what_follows(environment: dict[str, str], tmp_path: Path) -> None:
    code, output = broken(environment, tmp_path, CLIP.format(what="os._exit(5)"), *TWO)
    assert code == 1 and "1 passed" in output, output
    assert "rank 1: ended inside this check" in output and "exit code 5" in output
    assert "5-frozen-first" in output and "not reached" in output


def test_a_hang_fails_the_check_and_what_follows(environment: dict[str, str], tmp_path: Path) -> None:
    code, output = broken(environment, tmp_path, CLIP.format(what="time.sleep(600)"), *TWO, "--wait", "4")
    assert code == 1 and "1 passed" in output, output
    assert "4-clip-norm" in output and "rank 1: ended inside this check" in output
    assert "5-frozen-first" in output and "not reached" in output


def test_a_failure_on_one_rank_leaves_the_next_check_alone(environment: dict[str, str], tmp_path: Path) -> None:
    code, output = broken(environment, tmp_path, CLIP.format(what="raise KeyError('only here')"), *TWO)
    assert code == 1 and "3 passed, 1 FAILED" in output, output
    assert "only here" in output and "4-clip-norm" in output
    assert "not reached" not in output and "ended inside" not in output
