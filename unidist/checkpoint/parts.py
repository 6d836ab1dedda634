"""Parts: what one object has in a checkpoint; Store: what a framework knows of its objects and tensors."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from unidist.checkpoint.tree import Slot
from unidist.data import Data
from unidist.errors import MismatchError


class Part(ABC):
    """One object. `check` changes nothing and sees a `Slot` in place of each tensor; `restore` sees tensors of the CPU."""

    @abstractmethod
    def state(self) -> Any:
        """Tensors and plain values, nested."""

    def facts(self) -> dict[str, Any]:
        """Plain values that `check` compares with."""
        return {}

    @abstractmethod
    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        """Raise MismatchError that names the first thing in which the saved object differs from this one."""

    @abstractmethod
    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        """Set the object."""


class StatePart(Part):
    """A scheduler or scaler: anything with `state_dict` and `load_state_dict`."""

    def __init__(self, obj: Any, what: str) -> None:
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise TypeError(f"{what} is a {type(obj).__name__}, which has no state_dict and load_state_dict")
        self._obj = obj
        self._what = what

    def state(self) -> Any:
        return dict(self._obj.state_dict())

    def facts(self) -> dict[str, Any]:
        return {"class": type(self._obj).__name__}

    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        check_class(self._what, self._obj, facts)
        if bool(state) != bool(self._obj.state_dict()):
            raise MismatchError(f"{self._what} {'is disabled, the saved one was not' if state else 'is enabled, the saved one was not'}")

    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        self._obj.load_state_dict(state)


class DataPart(Part):
    """The position of what `wrap_data` gave."""

    def __init__(self, data: Any, what: str) -> None:
        if not isinstance(data, Data):
            raise TypeError(f"{what} is a {type(data).__name__}, not what wrap_data returns")
        self._data = data

    def state(self) -> Any:
        return self._data.state_dict()

    def check(self, state: Any, facts: Mapping[str, Any]) -> None:
        self._data._located(state)

    def restore(self, state: Any, facts: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state)


class Store(ABC):
    """The framework's side. models: those that are saved along, by their label ("" when there is one), for names of parameters."""

    @abstractmethod
    def model(self, model: Any) -> Part:
        """Weights and buffers by name."""

    @abstractmethod
    def optimizer(self, optimizer: Any, models: Mapping[str, Any]) -> Part:
        """State by the names of the parameters, and every hyper-parameter."""

    @abstractmethod
    def signature(self, value: Any) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype name of a tensor of the framework; None for anything else. Raises TypeError for one that no file can hold."""

    @abstractmethod
    def write(self, named: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        """Tensors to a safetensors file."""

    @abstractmethod
    def read(self, data: bytes, dtypes: Mapping[str, str]) -> dict[str, Any]:
        """The tensors of a safetensors file, on the CPU, in memory of their own; dtypes: their names' dtypes."""

    @abstractmethod
    def random_state(self, models: Mapping[str, Any]) -> dict[str, Any]:
        """JSON of the framework's generators of this process."""

    @abstractmethod
    def set_random_state(self, state: Mapping[str, Any], seed: int | None, models: Mapping[str, Any]) -> None:
        """The other way round; with a seed, streams that are derived from it, at the position of `state`."""


def check_class(what: str, obj: Any, facts: Mapping[str, Any]) -> None:
    """Raise MismatchError when an object of another class was saved."""
    if type(obj).__name__ != facts["class"]:
        raise MismatchError(f"{what} is a {type(obj).__name__}, but a {facts['class']} was saved")


def check_names(what: str, held: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare names, shapes and dtypes; each value is a (shape, dtype name) pair, or None for a value that is no tensor.

    Raises MismatchError that names the first that differs.
    """
    missing = [name for name in held if name not in saved]
    unknown = [name for name in saved if name not in held]
    if missing or unknown:
        lists = [f"{word} {', '.join(map(repr, names[:5]))}" for word, names in (("lacks", missing), ("also has", unknown)) if names]
        raise MismatchError(f"{what} in the checkpoint {' and '.join(lists)}")
    for name, signature in held.items():
        if signature != saved[name]:
            raise MismatchError(f"{name!r} of {what} is {_words(signature)}, but {_words(saved[name])} in the checkpoint")


def signature_of(slot: Any) -> tuple[tuple[int, ...], str] | None:
    """What `check_names` compares of a saved value."""
    return (slot.shape, slot.dtype) if isinstance(slot, Slot) else None


def _words(signature: tuple[tuple[int, ...], str] | None) -> str:
    return "a plain value" if signature is None else f"{signature[1]} of shape {signature[0]}"
