"""How a model's steps are compiled: XLA and torch.compile are switched off, aloud, where they can't be; several steps in one refused."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unidist.errors import UnsupportedError
from unidist_keras.on_instance import of_class, put

if TYPE_CHECKING:
    from unidist.base import Backend


def check_functions(model: Any, backend: Backend, *, no_jit: str = "", one_step: str = "", make: Callable[..., None] | None = None) -> None:
    """Before Keras makes a step of this model, check how it was compiled.

    no_jit, one_step: the reasons why not, empty where it works. make: called as (model, backend, Keras' own maker, force) in place of
    Keras' own maker of the train function.
    """
    makers = {name: of_class(model, name) for name in ("make_train_function", "make_test_function")}
    if make is not None:
        makers["make_train_function"] = functools.partial(make, model, backend, makers["make_train_function"])
    for name, maker in makers.items():
        put(model, name, functools.partial(_make_function, model, backend, maker, no_jit, one_step))


def _make_function(model: Any, backend: Backend, make: Callable[..., Any], no_jit: str, one_step: str, force: bool = False) -> Any:
    if one_step and model.steps_per_execution > 1:
        raise UnsupportedError(f"compile(steps_per_execution={model.steps_per_execution}) doesn't run here: {one_step}; leave it at 1")
    if no_jit and model.jit_compile:
        if backend.world.rank == 0:
            warnings.warn(f"jit_compile is switched off: {no_jit}", stacklevel=2)
        model.jit_compile = False
    return make(force=force)
