"""Which framework an object or a process belongs to, without importing any."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

FRAMEWORKS = ("torch", "tensorflow")
_ROOTS = {"torch": "torch", "tensorflow": "tensorflow", "tf_keras": "tf_keras", "keras": "keras", "jax": "jax", "jaxlib": "jax"}


def origin(obj: Any) -> str | None:
    """ "torch", "tensorflow", "keras", "tf_keras" or "jax" for an object whose class derives from one; None otherwise."""
    found = {_ROOTS.get(cls.__module__.partition(".")[0]) for cls in type(obj).__mro__}
    for name in ("tf_keras", "keras", "tensorflow", "torch", "jax"):
        if name in found:
            return name
    return None


def framework_of(obj: Any) -> str | None:
    """The framework an object computes with; a Keras object's is its backend."""
    name = origin(obj)
    return keras_backend() if name == "keras" else name


def is_keras(obj: Any) -> bool:
    """Whether the object is Keras 3's (a model, layer, optimizer, loss, metric, data set)."""
    return origin(obj) == "keras"


def keras_backend() -> str | None:
    """The backend of an imported Keras 3; None before its import."""
    keras = sys.modules.get("keras")
    config = getattr(keras, "config", None)
    return str(config.backend()) if config is not None and hasattr(config, "backend") else None


def imported() -> list[str]:
    """The frameworks this process has imported; with a Keras, its backend alone."""
    backend = keras_backend()
    if backend in FRAMEWORKS:
        return [str(backend)]
    return [name for name in FRAMEWORKS if name in sys.modules]


def installed() -> list[str]:
    """The frameworks that could be imported."""
    return [name for name in FRAMEWORKS if is_installed(name)]


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
