"""Comparisons that say what they saw; each raises AssertionError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class Raised:
    """What `raises` caught."""

    def __init__(self) -> None:
        self.error: BaseException = AssertionError("nothing was raised yet")

    @property
    def text(self) -> str:
        """The message."""
        return str(self.error)


def close(actual: Any, truth: Any, tolerance: float, what: str = "the value") -> None:
    """Finite numbers, arrays, or mappings of them, within an absolute tolerance that grows with values above 1."""
    if isinstance(truth, Mapping):
        same(list(actual), list(truth), f"the names of {what}")
        for name, value in truth.items():
            close(actual[name], value, tolerance, f"{what} {name!r}")
        return
    found, wanted = np.asarray(actual), np.asarray(truth)
    if found.shape != wanted.shape:
        raise AssertionError(f"{what} has shape {found.shape}, not {wanted.shape}")
    if not wanted.size:
        return
    for whose, values in ((what, found), (f"the truth of {what}", wanted)):
        if not np.isfinite(values).all():
            raise AssertionError(f"{whose} is not finite: {values!r}")
    distance = np.abs(found - wanted) / np.maximum(1.0, np.abs(wanted))
    if distance.max() > tolerance:
        place = np.unravel_index(np.argmax(distance), distance.shape)
        raise AssertionError(
            f"{what} is {found[place]!r} at {tuple(map(int, place))}, not {wanted[place]!r}: off by {distance[place]:.3g}, "
            f"tolerance {tolerance:g}"
        )


def same(actual: Any, expected: Any, what: str = "the value") -> None:
    """Equal, bit for bit for arrays; dtypes of arrays too."""
    if isinstance(expected, np.ndarray):
        found = np.asarray(actual)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise AssertionError(f"{what} is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}")
        if found.tobytes() != expected.tobytes():
            raise AssertionError(f"{what} is {found!r}, not {expected!r}")
    elif not (actual == expected):
        raise AssertionError(f"{what} is {actual!r}, not {expected!r}")


def true(condition: Any, what: str) -> None:
    """`what` says what holds."""
    if not condition:
        raise AssertionError(f"it does not hold that {what}")


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *texts: str) -> Iterator[Raised]:
    """The block raises an error of this kind whose message contains each of the texts, case apart."""
    caught = Raised()
    try:
        yield caught
    except kind as error:
        caught.error = error
        for text in texts:
            if text.lower() not in str(error).lower():
                raise AssertionError(f"the message does not say {text!r}: {type(error).__name__}: {error}") from error
        return
    names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    raise AssertionError(f"{names} was not raised")
