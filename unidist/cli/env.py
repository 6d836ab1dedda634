"""`unidist env`: what was found on this machine and in this environment, and what `init` would make of it."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from unidist import frameworks
from unidist.hardware.cpus import num_cores
from unidist.launchers.gpus import num_visible_gpus
from unidist.version import __version__
from unidist.world import explain_world

PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy")
PREFIXES = ("UNIDIST_TRAIN_", "KERAS_BACKEND", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS", "TF_CONFIG", "HOROVOD_")
SECRET = "UNIDIST_TRAIN_STORE"


def env() -> None:
    """Print versions, devices, launcher variables and the choice that unidist.init() would make here, each with its reason."""
    print(f"unidist {__version__} | Python {platform.python_version()} | {platform.system()} {platform.machine()}")
    print("packages:  " + (", ".join(_versions()) or "none of " + ", ".join(PACKAGES)))
    print(f"devices:   {num_visible_gpus()} visible GPUs, {num_cores()} CPU cores for this process")
    print("launcher:  " + "\n           ".join(explain_world(os.environ)))
    print("choice:    " + _choice())
    for name in sorted(os.environ):
        if name.startswith(PREFIXES):
            print(f"  {name}={'(set)' if name == SECRET else os.environ[name]}")


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _choice() -> str:
    told = {name: os.environ.get(f"UNIDIST_TRAIN_{name.upper()}") for name in ("backend", "framework")}
    said = ", ".join(f"{name} {value!r} from unidist run" for name, value in told.items() if value)
    installed = frameworks.installed()
    if told["framework"] or len(installed) == 1:
        return (said + "; " if said else "") + f"framework {told['framework'] or installed[0]}"
    if not installed:
        return "no framework is installed, so unidist.init() raises MissingDependencyError"
    keras = os.environ.get("KERAS_BACKEND")
    reason = f"Keras would run on {keras} (KERAS_BACKEND)" if keras else "the one that the script imports first counts"
    return (said + "; " if said else "") + f"{' and '.join(installed)} are both installed: {reason}"
