"""Runs the files of tests/tensorflow, each in a process of its own; see the conftest there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).resolve().parents[1] / "tensorflow").glob("test_*.py"))


def test_there_are_files():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file(file):
    environ = {**os.environ, "UNIDIST_TEST_APART": "1", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-m", "pytest", str(file)], capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
