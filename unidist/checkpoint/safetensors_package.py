"""The package that writes and reads tensors; needed by `save` and `load` only."""

from __future__ import annotations

import importlib
from typing import Any

from unidist.errors import MissingDependencyError


def safetensors_module(name: str) -> Any:
    """A module of the package, such as "safetensors.numpy". Raises MissingDependencyError with the line that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("save and load need the package safetensors: pip install 'unidist-train[checkpoint]'") from error
