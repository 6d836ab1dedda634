"""Keras 3 on TensorFlow: optimizers exchange in `apply`, and the train step of Keras' own `fit` tells it what a replica counts.

Private names of Keras that are touched: on optimizers `_trainable_variables` (what it was built for), `_all_reduce_sum_gradients`
(replaced under MirroredStrategy, where `apply` has reduced before clipping) and `_learning_rate` (state.py, a schedule from rank 0);
those of `keras.src.losses.loss` are in losses.py. On models `_maybe_symbolic_build` (replaced under MirroredStrategy: Keras builds
from the mean of the replicas' first rows, which fails when those are uneven) and `_symbolic_build`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from unidist.errors import MismatchError, UnsupportedError
from unidist_tf import gradients, state
from unidist_tf.losses import SUM, counted_losses

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


class Counting(threading.local):
    """How the loss that is computed in this thread (one per replica) counts; set by steps while they are traced.

    weight: the rows of a train step of `fit`, by which `apply` weighs its gradients; scaled: the loss is multiplied by how
    it counts before gradients are taken, so that nothing is multiplied later.
    """

    weight: Any = None
    scaled: bool = False


class _OnInstance:
    """Stands in for a method on one object; a deep copy of that object has the class's method again."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner), self._owner)
        return getattr(type(copied), self._name).__get__(copied)


def is_wrapped(optimizer: Any) -> bool:
    """Whether `apply` was replaced on this object."""
    return isinstance(vars(optimizer).get("apply"), _OnInstance)


def build_optimizer(optimizer: Any, model: Any) -> None:
    """Build it for the model's trainable variables, or compare with what it was built for.

    Raises MismatchError when it was built for other variables.
    """
    variables = state.trainable(model)
    if not optimizer.built:
        optimizer.build(variables)
    held = optimizer._trainable_variables
    if {id(state.raw(v)) for v in held} != {id(state.raw(v)) for v in variables}:
        raise MismatchError(
            f"the optimizer was built for {len(held)} variables, which are not the model's {len(variables)} trainable ones; build a new "
            "optimizer for this model"
        )


def adapt_optimizer(optimizer: Any, backend: TFBackend) -> None:
    """Put an `apply` on the object that exchanges first; its class and `get_config` stay Keras' own."""

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return _apply(backend, optimizer, list(grads), trainable_variables)

    optimizer.apply = _OnInstance(optimizer, "apply", apply)
    optimizer._all_reduce_sum_gradients = _OnInstance(optimizer, "_all_reduce_sum_gradients", list)


def _apply(backend: TFBackend, optimizer: Any, grads: list[Any], variables: Any) -> Any:
    if not backend.reduced.take(grads):
        weight = backend.counting.weight
        scale = backend._seen_scale() if weight is None else None
        known = optimizer._trainable_variables if variables is None else list(variables)
        backend.check_wrapped(optimizer, known)
        grads = backend._reduce(grads, scale=scale, weight=weight, variables=known)
    return apply_reduced(optimizer, grads, variables)


def apply_reduced(optimizer: Any, grads: Sequence[Any], variables: Any) -> Any:
    """Keras' own update with gradients that are the same on all replicas.

    Rows of a sparse gradient that repeat are summed first: Keras squares them one by one, which is not what Adam means.
    """
    return type(optimizer).apply(optimizer, [gradients.merged_rows(g) for g in grads], variables)


def check_compiled(model: Any, backend: TFBackend) -> None:
    """Before fit trains with several replicas: raise UnsupportedError unless its optimizer exchanges."""
    optimizer = model.optimizer
    if backend.num_replicas > 1 and optimizer is not None and not is_wrapped(optimizer):
        raise UnsupportedError(
            f"the model was compiled with a {type(optimizer).__name__} that did not go through wrap_optimizer, so the replicas' gradients "
            "would not be averaged; call model.compile(unidist.wrap_optimizer(optimizer), ...)"
        )


def install_train_step(model: Any, backend: TFBackend) -> None:
    """Keras' (or the user's) `train_step` on this object, with its losses counted locally and the replica's rows as the weight."""
    original = _of_class(model, "train_step")

    def train_step(data: Any) -> Any:
        check_compiled(model, backend)
        rows = num_rows(data)
        counting = backend.counting
        counting.weight = rows
        try:
            with counted_losses(lambda loss, denominator: _counted(backend, loss, denominator, rows)):
                logs = original(data)
        finally:
            counting.weight = None
        return _mean_logs(model, backend, logs, rows)

    model.train_step = train_step


def install_test_step(model: Any, backend: TFBackend) -> None:
    """Likewise `test_step`, where replicas take the same number of steps: losses count by their own denominators."""
    original = _of_class(model, "test_step")

    def test_step(data: Any) -> Any:
        rows = num_rows(data)
        with counted_losses(lambda loss, denominator: _counted(backend, loss, denominator, rows)):
            return original(data)

    model.test_step = test_step


def _of_class(model: Any, name: str) -> Callable[..., Any]:
    """The method of the model's class, not what an earlier backend of this process put on the object."""
    return getattr(type(model), name).__get__(model)  # type: ignore[no-any-return]


def without_xla(model: Any) -> None:
    """Horovod's operations have no XLA form, and on GPUs Keras compiles by itself."""
    original = _of_class(model, "make_train_function")

    def make_train_function(force: bool = False) -> Any:
        model.jit_compile = False
        return original(force=force)

    model.make_train_function = make_train_function


def install_build(model: Any, strategy: Any) -> None:
    """Metrics and losses are built from the first replica's rows of the first batch."""

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            batch = next(next(data for _, _, data in iterator))
            data_batch = keras.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], batch)
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    model._maybe_symbolic_build = build


def num_rows(data: Any) -> tf.Tensor:
    """Rows of the inputs of a batch as Keras' fit has it."""
    inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
    return tf.shape(next(leaf for leaf in keras.tree.flatten(inputs) if leaf is not None))[0]


def _counted(backend: TFBackend, loss: Any, denominator: Any, rows: Any) -> Any:
    """A local loss so that the mean over replicas, weighted by rows, is the loss of the whole batch by its own denominator."""
    size = tf.cast(rows, loss.dtype)
    own = tf.ones_like(size) if denominator is SUM else tf.cast(denominator, loss.dtype)
    total, total_size = (tf.stop_gradient(t) for t in backend._sum([own, size], None)[0])
    factor = tf.math.divide_no_nan(total_size, size)
    return loss * (factor if denominator is SUM else factor * tf.math.divide_no_nan(own, total))


def _mean_logs(model: Any, backend: TFBackend, logs: Any, rows: Any) -> Any:
    """What a user's own train step returns besides metrics, as the mean over replicas; Keras takes the first replica's."""
    if backend._num_parts() == 1 or not isinstance(logs, Mapping) or set(logs) == set(model.get_metrics_result()):
        return logs
    names = [name for name, value in logs.items() if getattr(value, "shape", None) == () and value.dtype.is_floating]
    weight = gradients.cast_weight(rows, [logs[name] for name in names])
    weighted = gradients.scaled([logs[name] for name in names], weight)
    sums, total = backend._sum(weighted, weight)
    return {**logs, **dict(zip(names, gradients.divided(sums, total)))}
