"""The table of backends: where each lives, what it needs, the line that installs it, how it is launched; entry points."""

from __future__ import annotations

import difflib
import functools
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unidist import frameworks
from unidist.errors import FrameworkMismatchError, LaunchError, MissingDependencyError, UnknownBackendError

if TYPE_CHECKING:
    from unidist.base import Backend

GROUP = "unidist.backends"


@dataclass(frozen=True)
class Entry:
    """One backend of one framework.

    target: "module:Class"; requires: modules that must be importable; install: the line that brings them;
    one_process: whether one process drives all devices of a host; alone: whether a job can't have several such processes; tier: how
    well it is looked after (1 is best).
    """

    framework: str
    name: str
    target: str
    requires: tuple[str, ...]
    install: str
    one_process: bool = False
    tier: int = 3
    aliases: tuple[str, ...] = field(default=())
    alone: bool = False

    @property
    def key(self) -> str:
        """The full name, such as "torch/ddp"."""
        return f"{self.framework}/{self.name}"

    def missing(self) -> list[str]:
        """The required modules that this environment lacks."""
        return [module for module in self.requires if not frameworks.is_installed(module)]

    def load(self) -> type[Backend]:
        """The backend's class; imports its framework.

        Raises MissingDependencyError with the line that installs what is absent.
        """
        absent = self.missing()
        if absent:
            raise MissingDependencyError(
                f"backend {self.key!r} needs {' and '.join(absent)}, which this environment lacks; install with: {self.install}"
            )
        module, _, name = self.target.partition(":")
        backend: type[Backend] = getattr(importlib.import_module(module), name)
        return backend


_TORCH = "pip install 'unidist-train[torch]'"
_TENSORFLOW = "pip install 'unidist-train[tensorflow]'"
_HOROVOD = "unidist install horovod"

BUILTIN = (
    Entry("torch", "local", "unidist_torch.local:Local", ("torch",), _TORCH, True, 1, alone=True),
    Entry("torch", "ddp", "unidist_torch.ddp:DDP", ("torch",), _TORCH, False, 1),
    Entry("torch", "dataparallel", "unidist_torch.dataparallel:DataParallel", ("torch",), _TORCH, True, 3, ("dp",), alone=True),
    Entry("torch", "horovod", "unidist_torch.horovod:Horovod", ("torch", "horovod"), _HOROVOD, False, 2),
    Entry("tensorflow", "local", "unidist_tf.local:Local", ("tensorflow",), _TENSORFLOW, True, 1, alone=True),
    Entry(
        "tensorflow",
        "mirrored",
        "unidist_tf.mirrored:Mirrored",
        ("tensorflow",),
        _TENSORFLOW,
        True,
        1,
        ("multiworkermirrored", "multi_worker_mirrored"),
    ),  # fmt: skip
    Entry("tensorflow", "horovod", "unidist_tf.horovod:Horovod", ("tensorflow", "horovod"), _HOROVOD, False, 2),
)

_HINTS = {
    "nccl": "is a transport, which unidist chooses by itself; use 'ddp' (torch) or 'mirrored' (tensorflow)",
    "gloo": "is a transport, which unidist chooses by itself; use 'ddp' (torch) or 'mirrored' (tensorflow)",
    "mpi": "is a transport; start the job with mpirun and use 'ddp' or 'horovod'",
    "jax": "is a framework that unidist does not cover; it covers torch and tensorflow",
    "torch": "is a framework; its backends are 'ddp', 'dataparallel', 'horovod' and 'local'",
    "tensorflow": "is a framework; its backends are 'mirrored', 'horovod' and 'local'",
    "fsdp": "is not there yet; use 'ddp'",
    "deepspeed": "is not there yet; use 'ddp'",
}


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All known backends: the built-in ones, then those of other distributions in entry point group `unidist.backends`.

    An entry point's value names an `Entry`; its module must not import a framework.
    """
    from importlib import metadata  # costs 20 ms, and only this needs it

    return BUILTIN + tuple(point.load() for point in metadata.entry_points(group=GROUP))


def names() -> list[str]:
    """Every backend's short name, once."""
    return list(dict.fromkeys(entry.name for entry in entries()))


def candidates(name: str) -> list[Entry]:
    """The entries with this name ("ddp", "torch/ddp", an alias), one for each framework that has it.

    Raises UnknownBackendError with the nearest name or a sentence that helps.
    """
    wanted = name.lower()
    found = [entry for entry in entries() if wanted in (entry.name, entry.key, *entry.aliases)]
    if not found:
        raise UnknownBackendError(f"unknown backend {name!r}{_advice(wanted)}; known are {', '.join(names())}")
    return found


def framework_name(name: str) -> str:
    """The framework's own name for what a user wrote ("tf", "PyTorch").

    Raises UnknownBackendError.
    """
    known = {"torch": "torch", "pytorch": "torch", "tensorflow": "tensorflow", "tf": "tensorflow"}
    if name.lower() in known:
        return known[name.lower()]
    hint = f": {name!r} {_HINTS[name.lower()]}" if name.lower() in _HINTS else _nearest(name, known)
    raise UnknownBackendError(f"unknown framework {name!r}{hint}; known are torch and tensorflow")


def find(framework: str, name: str) -> Entry:
    """The entry of a backend for a framework.

    Raises UnknownBackendError, or FrameworkMismatchError when only the other framework has it.
    """
    found = candidates(name)
    for entry in found:
        if entry.framework == framework:
            return entry
    others = [entry.name for entry in entries() if entry.framework == framework]
    raise FrameworkMismatchError(
        f"backend {name!r} is one of {found[0].framework}, but the framework is {framework}; its backends are {', '.join(others)}"
    )


def num_processes(backend: str | None, framework: str | None, num_devices: int, processes: int | None = None) -> int:
    """How many processes a job of `num_devices` devices on one host has; without a backend, as the framework's own one.

    processes: how many were asked for, which is a choice where one process drives several devices. Raises LaunchError where it isn't.
    """
    usual, free = _usual_processes(backend, framework, num_devices)
    if processes is None or processes == usual:
        return usual
    if not free or num_devices % processes:
        several = f"a number by which {num_devices} can be divided" if free else str(usual)
        raise LaunchError(f"{processes} processes were asked for, but {num_devices} devices of this backend are driven by {several}")
    return processes


def _usual_processes(backend: str | None, framework: str | None, num_devices: int) -> tuple[int, bool]:
    """(processes of a job, whether it may have another number of them)."""
    if backend in (None, "auto"):
        return (1, True) if framework == "tensorflow" else (num_devices, False)
    found = candidates(str(backend))
    entry = next((entry for entry in found if framework in (None, entry.framework)), found[0])
    return 1 if entry.one_process else num_devices, entry.one_process and not entry.alone


def _advice(name: str) -> str:
    return f": {name!r} {_HINTS[name]}" if name in _HINTS else _nearest(name, names())


def _nearest(name: str, known: object) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), 1)  # type: ignore[call-overload]
    return f", did you mean {near[0]!r}?" if near else ""
