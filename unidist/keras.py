"""What Keras users import by name; Keras itself is imported when one of the names is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unidist_keras.callbacks import LearningRateWarmup as LearningRateWarmup

__all__ = ["LearningRateWarmup"]  # noqa: F822


def __getattr__(name: str) -> Any:
    """A public name, from the package that needs Keras."""
    if name not in __all__:
        raise AttributeError(f"module 'unidist.keras' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module("unidist_keras.callbacks"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
