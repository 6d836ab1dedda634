"""Methods that are put on one Keras object; its class, its saved form and its copies do not have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OnInstance:
    """Stands in for a method on one object; a deep copy of that object has the class's method again."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner), self._owner)
        return getattr(type(copied), self._name).__get__(copied)


def of_class(owner: Any, name: str) -> Callable[..., Any]:
    """The method of the object's class, not what an earlier job of this process put on the object."""
    return getattr(type(owner), name).__get__(owner)  # type: ignore[no-any-return]


def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let `function` stand in for the method on this object."""
    setattr(owner, name, OnInstance(owner, name, function))


def remove(owner: Any, name: str) -> None:
    """Let this object have its class's method again."""
    if is_put(owner, name):
        delattr(owner, name)


def is_put(owner: Any, name: str) -> bool:
    """Whether something stands in for the method on this object."""
    return isinstance(vars(owner).get(name), OnInstance)
