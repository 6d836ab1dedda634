"""Names of a Keras model's or optimizer's variables that are the same in every process and on both Keras backends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_AUTOMATIC = re.compile(r"_\d+(?=[/_]|$)")  # "dense_1/kernel", and "dense_1_kernel_momentum" of an optimizer


def without_numbers(name: str) -> str:
    """A name without the numbers that Keras counts per process."""
    return _AUTOMATIC.sub("", name)


def numbered(variables: Sequence[Any]) -> dict[str, Any]:
    """Name to variable: its number in the model's order, and its path without the numbers that Keras counts per process."""
    return {f"{index}/{without_numbers(variable.path)}": variable for index, variable in enumerate(variables)}


def model_variables(model: Any) -> dict[str, Any]:
    """The weights of a model, those that are trained and those that are not, in Keras' order."""
    return numbered(model.weights)


def check_built(model: Any) -> None:
    """Raise ValueError for a model that has no variables yet."""
    if not model.built:
        raise ValueError(
            f"the Keras model {model.name!r} has no weights yet: give it an Input, or call model.build(input_shape), before wrap_model"
        )
