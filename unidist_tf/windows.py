"""Keras' own `gradient_accumulation_steps` in `fit` under MirroredStrategy.

Keras chooses inside the compiled step, by a condition, whether a window ends; a strategy allows no update of variables in there. So
there are two compiled steps, one that holds gradients and one that ends a window, and Python chooses by the optimizer's count.

Private names of Keras' optimizers that are touched: `_backend_apply_gradients` (replaced on the instance), and what it calls there:
`_accumulated_gradients`, `_get_variable_index`, `_backend_increment_gradient_accumulators`, `_clip_gradients`, `_apply_weight_decay`,
`_backend_update_step`, `_update_model_variables_moving_average`, `_trainable_variables`, `_iterations` (`iterations` counts windows).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from unidist.errors import UnsupportedError
from unidist_keras.on_instance import put

if TYPE_CHECKING:
    from unidist_tf.mirrored import Mirrored


class Windows:
    """Which kind of step is being traced: `ends` is None outside `fit`, where nobody chooses."""

    ends: bool | None = None


def accumulates(optimizer: Any) -> bool:
    """Whether Keras' optimizer updates once in several steps."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def adapt(optimizer: Any, backend: Mirrored) -> None:
    """Let the optimizer hold gradients or end a window as `backend.windows` says while a step is traced."""
    put(optimizer, "_backend_apply_gradients", functools.partial(_apply, optimizer, backend))


def two_steps(model: Any, backend: Mirrored, make: Callable[..., Any], force: bool = False) -> None:
    """In place of `make_train_function`: with an optimizer that accumulates, a function that chooses between two steps."""
    if not accumulates(model.optimizer):
        make(force=force)
        return
    if model.train_function is not None and not force:
        return
    steps = []
    for _ in range(2):
        make(force=True)
        steps.append(model.train_function)
    hold, end = steps

    def train_function(iterator: Any) -> Any:
        optimizer = model.optimizer
        ends = (int(optimizer._iterations.numpy()) + 1) % optimizer.gradient_accumulation_steps == 0
        backend.windows.ends = ends
        try:
            return (end if ends else hold)(iterator)
        finally:
            backend.windows.ends = None

    model.train_function = train_function


def _apply(optimizer: Any, backend: Mirrored, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Keras' own lines, without the condition. Every replica has the same reduced gradients."""
    if backend.windows.ends is None:
        raise UnsupportedError(
            "under MirroredStrategy an optimizer with gradient_accumulation_steps works in fit only; in own loops use "
            "unidist.make_train_step(..., gradient_accumulation_steps=k)"
        )
    held = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]
    grads = [tf.convert_to_tensor(g) for g in grads]
    if backend.windows.ends:
        means = [(g + h) / optimizer.gradient_accumulation_steps for g, h in zip(grads, held)]
        means = optimizer._clip_gradients(means)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(means, variables, optimizer.learning_rate)
        _reset(held)
    else:
        optimizer._backend_increment_gradient_accumulators(grads, held)
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def _reset(held: Sequence[Any]) -> None:
    def clear(strategy: Any, variables: Sequence[Any]) -> None:
        for variable in variables:
            strategy.extended.update(variable, lambda v: v.assign(tf.zeros_like(v)), group=False)

    tf.distribute.get_replica_context().merge_call(clear, args=([v.value for v in held],))
