"""The demo: one unchanged script under every usable backend, and whether all of them learned what one device did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidist import registry
from unidist.errors import LaunchError

ALLOWED = 1e-5
RUNS = (
    ("tensorflow", "local", 1), ("tensorflow", "mirrored", 2), ("tensorflow", "horovod", 2),
    ("torch", "local", 1), ("torch", "ddp", 2), ("torch", "horovod", 2),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one run of the script reached.

    difference: the largest of any weight from `local` of the same framework after the first epoch.
    """

    framework: str
    backend: str
    devices: int
    loss: float
    accuracy: float
    speed: float
    weights: dict[str, Any] = field(repr=False)
    difference: float = 0.0


def script() -> Path:
    """The example that is trained: the checkout's, else the one that was installed beside the package."""
    checkout = Path(__file__).resolve().parent.parent / "examples"
    installed = [Path(sysconfig.get_path("data", scheme)) / "share/unidist-train/examples" for scheme in _schemes()]
    for folder in (checkout, *installed):
        if (folder / "digits.py").exists():
            return folder / "digits.py"
    raise LaunchError(f"the demo's script digits.py is in none of {', '.join(map(str, (checkout, *installed)))}; reinstall unidist-train")


def _schemes() -> list[str]:
    return [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]


def usable_runs() -> list[tuple[str, str, int]]:
    """The runs whose backends are installed."""
    entries = {entry.key: entry for entry in registry.entries()}
    return [run for run in RUNS if not entries[f"{run[0]}/{run[1]}"].missing()]


def train(run: tuple[str, str, int], epochs: int, progress: Callable[[str], None]) -> Outcome:
    """Run the script once; `progress` gets its lines. Raises LaunchError with the output when it fails."""
    import numpy

    framework, backend, devices = run
    with tempfile.TemporaryDirectory(prefix="unidist-demo-") as folder:
        record = Path(folder) / "record.npz"
        command = [sys.executable, "-m", "unidist", "run", "-n", str(devices), "--backend", backend, "--framework", framework,
                   str(script()), "--epochs", str(epochs), "--record", str(record)]  # fmt: skip
        lines = list(_watched(_lines(command), progress))
        if not record.exists():
            raise LaunchError("\n".join(lines[-20:] + [f"the demo's run of {framework}/{backend} failed; its last lines are above"]))
        with numpy.load(record) as saved:
            found = {name: saved[name] for name in saved.files}
    return Outcome(framework, backend, devices, float(found.pop("loss")), float(found.pop("accuracy")), float(found.pop("speed")), found)


def compare(outcomes: list[Outcome]) -> tuple[list[Outcome], float | None]:
    """The outcomes with their differences filled in, and that between the two frameworks' `local` runs (None when one is absent)."""
    local = {o.framework: o for o in outcomes if o.backend == "local"}
    filled = [Outcome(**{**o.__dict__, "difference": largest_difference(o, local[o.framework])}) for o in outcomes]
    between = largest_difference(*local.values()) if len(local) == 2 else None
    return filled, between


def largest_difference(one: Outcome, other: Outcome) -> float:
    """Of any weight, by position: Keras orders a model's weights alike on both frameworks."""
    pairs = list(zip(one.weights.values(), other.weights.values(), strict=True))
    return max(float(abs(a - b).max()) for a, b in pairs)


def _lines(command: list[str]) -> Iterator[str]:
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    environ = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"} | exact
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout is not None
        yield from process.stdout


def _watched(lines: Iterator[str], progress: Callable[[str], None]) -> Iterator[str]:
    for line in lines:
        if re.match(r"epoch |test ", line):
            progress(line.strip())
        yield line.rstrip()
