"""Nested states as JSON that comes back as it was: tensors become slots, tuples, counters and odd keys stay what they are."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """The place of a tensor: its name in the file, its shape, its dtype's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def encode(value: Any, place: str, slot_of: Callable[[str, Any], Slot | None]) -> Any:
    """JSON of None, numbers, strings, lists, tuples, dicts and counters; every JSON object in it is marked by what it is.

    place: where the value is, for names and messages. slot_of: takes a tensor in and gives its slot; None for what is no tensor.
    Raises TypeError that names the place of anything else.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if type(value) in (list, tuple):
        items = [encode(item, _inside(place, index), slot_of) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_mapping(value, place, slot_of)
    slot = slot_of(place, value)
    if slot is not None:
        return {"tensor": slot.name, "shape": list(slot.shape), "dtype": slot.dtype}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # NumPy's numbers
        return encode(value.item(), place, slot_of)
    raise TypeError(
        f"{place or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold: it takes "
        "numbers, strings, None, tensors of the framework, and lists, tuples and dicts of them"
    )


def decode(value: Any, tensor_of: Callable[[Slot], Any]) -> Any:
    """What was encoded; tensor_of: what stands for a slot."""
    if isinstance(value, list):
        return [decode(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensor_of(Slot(value["tensor"], tuple(value["shape"]), value["dtype"]))
    ((mark, content),) = value.items()
    if mark == "float":
        return float(content)
    if mark == "tuple":
        return tuple(decode(content, tensor_of))
    if mark == "dict":
        return {key: decode(item, tensor_of) for key, item in content.items()}
    pairs = [(decode(key, tensor_of), decode(item, tensor_of)) for key, item in content]
    return Counter(dict(pairs)) if mark == "counter" else dict(pairs)


def slots(value: Any) -> dict[str, Slot]:
    """All slots of encoded JSON by name."""
    found: dict[str, Slot] = {}

    def note(slot: Slot) -> None:
        found[slot.name] = slot

    decode(value, note)
    return found


def _encode_mapping(value: Mapping[Any, Any], place: str, slot_of: Callable[[str, Any], Slot | None]) -> Any:
    if type(value) is not Counter and all(type(key) is str for key in value):
        return {"dict": {key: encode(item, _inside(place, key), slot_of) for key, item in value.items()}}
    pairs = [[encode(key, f"a key of {place}", slot_of), encode(item, _inside(place, key), slot_of)] for key, item in value.items()]
    return {"counter" if type(value) is Counter else "pairs": pairs}


def _inside(place: str, key: Any) -> str:
    return f"{place}/{key}" if place else str(key)
