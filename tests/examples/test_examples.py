"""Every example runs on every backend it names, prints once per job, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unidist import registry

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BIN = Path(sys.executable).parent
RUN = [sys.executable, "-m", "unidist", "run", "-n", "2"]
SHORT = ["--epochs", "1", "--steps", "4"]


def call(command, timeout=120, **extra):
    environ = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"} | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **extra}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def need(key):
    """Skip where the backend is absent, unless it is required."""
    entry = next(e for e in registry.entries() if e.key == key)
    required = os.environ.get("UNIDIST_TRAIN_REQUIRE", "")
    if entry.missing() and required != "all" and key not in required.split(","):
        pytest.skip(f"{key} needs {', '.join(entry.missing())}")


def run_on(key, script, arguments):
    need(key)
    framework, backend = key.split("/")
    return call([*RUN, "--backend", backend, "--framework", framework, str(EXAMPLES / script), *arguments])


@pytest.mark.parametrize("key", ["torch/ddp", "torch/horovod", "tensorflow/mirrored", "tensorflow/horovod"])
def test_digits(key):
    output = run_on(key, "digits.py", SHORT)
    assert output.count("epoch 1/1: loss") == 1 and output.count("test accuracy") == 1, output


def test_digits_is_one_short_file():
    assert len((EXAMPLES / "digits.py").read_text().splitlines()) <= 60


def test_digits_learns():
    output = call([sys.executable, str(EXAMPLES / "digits.py")], KERAS_BACKEND="torch")
    accuracy = float(re.search(r"test accuracy ([\d.]+)", output)[1])
    assert accuracy >= 0.97


def test_digits_under_torchrun():
    output = call([str(BIN / "torchrun"), "--nproc-per-node", "2", str(EXAMPLES / "digits.py"), *SHORT], KERAS_BACKEND="torch")
    assert output.count("epoch 1/1: loss") == 1


def test_digits_under_horovodrun():
    need("tensorflow/horovod")
    output = call([str(BIN / "horovodrun"), "-np", "2", sys.executable, str(EXAMPLES / "digits.py"), *SHORT], KERAS_BACKEND="tensorflow")
    assert output.count("epoch 1/1: loss") == 1


@pytest.mark.parametrize("key", ["torch/ddp", "torch/horovod"])
def test_torch_native(key):
    output = run_on(key, "torch_native.py", ["--epochs", "6"])
    accuracy = float(re.search(r"test accuracy ([\d.]+)", output)[1])
    assert accuracy >= 0.85 and output.count("epoch 6/6: loss") == 1


@pytest.mark.parametrize("key", ["torch/ddp", "tensorflow/mirrored", "tensorflow/horovod"])
def test_keras_fit(key):
    output = run_on(key, "keras_fit.py", SHORT)
    assert len(re.findall(r" loss: ", output)) == 1 and output.count("test accuracy") == 1, output
