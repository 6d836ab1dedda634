"""Nested tuples, lists, dicts, named tuples and dataclasses: map over their leaves, keeping the type of each level."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def map_nest(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """`function` applied to each leaf of `value`, with the leaves at the same place of `others`."""
    if isinstance(value, Mapping):
        items = {key: map_nest(function, item, *(o[key] for o in others)) for key, item in value.items()}
        return items if type(value) is dict else _rebuild_mapping(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nest(function, *items) for items in zip(value, *others)))
    if isinstance(value, (tuple, list)):
        return type(value)(map_nest(function, *items) for items in zip(value, *others))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        changed = {n: map_nest(function, getattr(value, n), *(getattr(o, n) for o in others)) for n in fields}
        return dataclasses.replace(value, **changed)
    return function(value, *others)


def leaves(value: Any) -> list[Any]:
    """All leaves in order."""
    found: list[Any] = []
    map_nest(found.append, value)
    return found


def paths(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """All leaves with their place, written like code: `['x'][0]`."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in paths(item, f"{prefix}[{key!r}]")]
    if isinstance(value, (tuple, list)):
        return [pair for i, item in enumerate(value) for pair in paths(item, f"{prefix}[{i}]")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return [pair for name in names for pair in paths(getattr(value, name), f"{prefix}.{name}")]
    return [(prefix, value)]


def _rebuild_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of `like`'s class; a plain dict where the class can't be called with one."""
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
