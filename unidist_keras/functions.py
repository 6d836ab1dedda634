"""How a model's steps are compiled: XLA and torch.compile are switched off, aloud, where they can't be; several steps in one refused."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unidist.errors import UnsupportedError
from unidist_keras.on_instance import of_class, put

if TYPE_CHECKING:
    from unidist.base import Backend


def check_functions(
    model: Any, backend: Backend, *, no_jit: str = "", one_step: str = "", make: Callable[..., None] | None = None,
    bounded: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None,
) -> None:  # fmt: skip
    """Before Keras makes a step of this model, check how it was compiled.

    no_jit, one_step: the reasons why not, empty where it works. make: called as (model, backend, Keras' own maker, force) in place of
    Keras' own maker of the train function. bounded: around a step, which may wait for other processes.
    """
    makers = {name: of_class(model, name) for name in ("make_train_function", "make_test_function")}
    if make is not None:
        makers["make_train_function"] = functools.partial(make, model, backend, makers["make_train_function"])
    for name, maker in makers.items():
        put(model, name, functools.partial(_make_function, model, backend, name.removeprefix("make_"), maker, no_jit, one_step, bounded))


def _make_function(
    model: Any, backend: Backend, name: str, make: Callable[..., Any], no_jit: str, one_step: str, bounded: Any, force: bool = False
) -> None:
    if one_step and model.steps_per_execution > 1:
        raise UnsupportedError(f"compile(steps_per_execution={model.steps_per_execution}) doesn't run here: {one_step}; leave it at 1")
    if no_jit and model.jit_compile:
        if backend.world.rank == 0:
            warnings.warn(f"jit_compile is switched off: {no_jit}", stacklevel=2)
        model.jit_compile = False
    before = getattr(model, name)
    make(force=force)
    function = getattr(model, name)
    if bounded is not None and backend.world.size > 1 and function is not before:
        setattr(model, name, functools.partial(_bounded_step, bounded, function))


def _bounded_step(bounded: Callable[[str], contextlib.AbstractContextManager[Any]], function: Callable[[Any], Any], iterator: Any) -> Any:
    with bounded("a step of Keras' fit or evaluate"):
        return function(iterator)
