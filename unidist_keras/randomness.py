"""A replica's own random stream in Keras layers: each seed is moved by the replica's number; the state stays equal on all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from unidist_keras.on_instance import of_class, put

_APART = 1_000_003


def separate(model: Any, replica: Callable[[], Any]) -> None:
    """Let the seed generators of a model's layers (Dropout and others) give each replica other seeds; replica 0 keeps Keras' own.

    replica: the number of the replica that calls, a number or 0-d tensor. Draws without a generator of a layer's are not covered.
    """
    for layer in model._flatten_layers():
        for generator in layer._seed_generators:
            put(generator, "next", functools.partial(_next, of_class(generator, "next"), replica))


def _next(original: Callable[..., Any], replica: Callable[[], Any], ordered: bool = True) -> Any:
    seed = original(ordered)
    shift = keras.ops.cast(keras.ops.stack([replica() * _APART, 0]), seed.dtype)
    return seed + shift
