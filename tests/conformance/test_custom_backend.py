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


BROKEN = {
    "broken_entry.py": """
from unidist.registry import Entry
ENTRY = Entry("torch", "broken", "broken_backend:Broken", requires=("torch",), install="")
""",
    "broken_backend.py": """
from unidist_relay.backend import Relay
class Broken(Relay):
    name = "broken"
    refuses = {4: "no clipping"}
""",
    "broken-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: broken\nVersion: 1\n",
    "broken-1.dist-info/entry_points.txt": "[unidist.backends]\nbroken = broken_entry:ENTRY\n",
}


def test_a_broken_promise_fails(environment: dict[str, str], tmp_path: Path) -> None:
    """A backend that declares to refuse what it does, and does not declare what it refuses, fails both points."""
    for name, text in BROKEN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    broken = environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])}
    code, output = call(broken, "unidist", "test", "torch/broken", "-n", "2", "--only", "4-clip-norm", "--only", "6-synchronised-even")
    assert code == 1, output
    assert "declares that it refuses this point (no clipping)" in output
    assert "torch/broken has no synchronised BatchNorm" in output
