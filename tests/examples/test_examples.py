"""Every example runs on every backend it names, prints once per job, and learns.

The variable UNIDIST_TRAIN_REQUIRE ("torch/ddp,tensorflow/horovod", or "all") makes a backend that is absent a failure in place of a skip.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unidist import registry
from unidist.frameworks import is_installed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BIN = Path(sys.executable).parent
SHORT = ["--epochs", "1", "--steps", "4"]
FOREIGN = ("UNIDIST_", "KERAS_BACKEND", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "HOROVOD_")


def call(command, *, timeout=120, **extra):
    """What the job wrote to stdout and stderr; it ended well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environ = kept | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"} | extra
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environ, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, done.stderr


def required(key):
    return {key, "all"} & {name.strip() for name in os.environ.get("UNIDIST_TRAIN_REQUIRE", "").split(",")}


def need(key, *modules):
    """Skip where the backend, or what the example imports besides, is absent; fail where the backend is required."""
    entry = next(entry for entry in registry.entries() if entry.key == key)
    absent = [*entry.missing(), *(module for module in ("sklearn", *modules) if not is_installed(module))]
    if absent:
        reason = f"{key} needs {', '.join(absent)}: {entry.install}"
        pytest.fail(f"UNIDIST_TRAIN_REQUIRE names it, and {reason}") if required(key) else pytest.skip(reason)


def run_on(key, script, arguments, n=2):
    """The output of all ranks of an example under `unidist run`; the line at the start says once that it was this backend."""
    need(key, *(() if script == "torch_native.py" else ("keras",)))
    framework, backend = key.split("/")
    start = [sys.executable, "-m", "unidist", "run", "-n", n, "--tee", "all", "--backend", backend, "--framework", framework]
    output, errors = call([*start, EXAMPLES / script, *arguments])
    assert len(re.findall(rf"^\[0\] unidist \S+ \| {key} \| .*started by unidist run$", errors, re.M)) == 1, errors
    return output


def losses(output):
    """The losses of the epochs, each of which was printed once per job."""
    found = re.findall(r"epoch (\d+)/(\d+): loss (\S+)", output)
    assert [int(epoch) for epoch, _, _ in found] == list(range(1, int(found[0][1]) + 1)) if found else False, output
    values = [float(loss) for _, _, loss in found]
    assert all(math.isfinite(value) and value > 0 for value in values), output
    return values


def accuracy(output):
    """The accuracy at the end, which was printed once per job."""
    found = re.findall(r"test accuracy ([\d.]+)", output)
    assert len(found) == 1 and 0 <= float(found[0]) <= 1, output
    return float(found[0])


DIGITS = ["torch/ddp", "torch/dataparallel", "torch/horovod", "tensorflow/local", "tensorflow/mirrored", "tensorflow/horovod"]
first_losses = {}


@pytest.mark.parametrize("key", DIGITS)
def test_digits(key):
    """Short runs; on every backend the same loss, since initial weights, data and their order are the same."""
    output = run_on(key, "digits.py", SHORT, n=1 if key.endswith("/local") else 2)
    accuracy(output)
    first_losses[key] = losses(output)[0]
    assert max(first_losses.values()) - min(first_losses.values()) <= 2e-4, first_losses


def test_digits_is_one_short_file():
    assert len((EXAMPLES / "digits.py").read_text().splitlines()) <= 60


def test_digits_learns():
    need("torch/local", "keras")
    output, errors = call([sys.executable, EXAMPLES / "digits.py"], KERAS_BACKEND="torch")
    assert "| torch/local |" in errors and "started by python" in errors
    values = losses(output)
    assert len(values) == 10 and values[-1] < values[0] / 5 and accuracy(output) >= 0.97


@pytest.mark.parametrize(
    "key, launcher", [("torch/ddp", ["torchrun", "--nproc-per-node", "2"]), ("tensorflow/horovod", ["horovodrun", "-np", "2"])]
)
def test_digits_under_other_launchers(key, launcher):
    """Backend and framework come from the launcher and from Keras."""
    need(key, "keras")
    name, *options = launcher
    python = [] if name == "torchrun" else [sys.executable]
    output, errors = call([BIN / name, *options, *python, EXAMPLES / "digits.py", *SHORT], KERAS_BACKEND=key.split("/")[0])
    assert len(losses(output)) == 1 and (output + errors).count(f"| {key} |") == 1, output + errors
    assert f"started by {name}" in output + errors
    accuracy(output)


@pytest.mark.parametrize("key", ["torch/ddp", "torch/horovod"])
def test_torch_native(key):
    output = run_on(key, "torch_native.py", ["--epochs", "6"])
    values = losses(output)
    assert len(values) == 6 and values[-1] < values[0] and accuracy(output) >= 0.85


@pytest.mark.parametrize("key", ["torch/ddp", "tensorflow/mirrored", "tensorflow/horovod"])
def test_keras_fit(key):
    output = run_on(key, "keras_fit.py", ["--epochs", "4"])
    shown = [float(loss) for loss in re.findall(r"- loss: ([\d.]+)", output)]  # Keras' own lines, of rank 0 only
    assert len(shown) == 4 and shown[-1] < shown[0] and accuracy(output) >= 0.7, output
    assert len(re.findall(r"- val_loss: ([\d.]+)", output)) == 4


@pytest.mark.parametrize("key", ["torch/ddp", "tensorflow/horovod"])
def test_keras_fit_goes_on_after_a_crash(key, tmp_path):
    """The first job dies at the end of epoch 2; the second shows the epochs 3 and 4 only, and its files are gone at the end."""
    need(key, "keras")
    framework, backend = key.split("/")
    start = [sys.executable, "-m", "unidist", "run", "-n", 2, "--backend", backend, "--framework", framework]
    script = [EXAMPLES / "keras_fit.py", "--epochs", "4", "--steps", "4", "--backup", tmp_path / "backup"]
    with pytest.raises(AssertionError):
        call([*start, *script, "--stop-after", "2"])
    assert (tmp_path / "backup").is_dir()
    output, _ = call([*start, *script])
    assert re.findall(r"Epoch (\d)/4", output) == ["3", "4"], output
    assert not (tmp_path / "backup").exists()
    accuracy(output)
