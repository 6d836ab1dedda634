"""Keras 3 on TensorFlow: optimizers exchange in `apply`, and the train step of Keras' own `fit` tells it what a replica counts.

Private names of Keras that are touched: on optimizers `_trainable_variables` (what it was built for), `_all_reduce_sum_gradients`
(replaced under MirroredStrategy, where `apply` has reduced before clipping) and `_learning_rate` (state.py, a schedule from rank 0);
those of `keras.src.losses.loss` are in unidist_keras/counting.py. On models `_maybe_symbolic_build` (replaced under
MirroredStrategy: Keras builds from the mean of the replicas' first rows, which fails when those are uneven) and `_symbolic_build`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from unidist.errors import MismatchError, UnsupportedError
from unidist_keras.counting import SUM, counted_losses
from unidist_keras.on_instance import is_put, of_class, put, remove
from unidist_tf import gradients, state

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


class Counting(threading.local):
    """How the loss that is computed in this thread (one per replica) counts; set by steps while they are traced.

    rows: samples of the replica in any step of Keras, 0 for a borrowed one. weight: the rows of a train step of `fit`, by which `apply`
    weighs its gradients; scaled: the loss is multiplied by how it counts before gradients are taken, so that nothing is multiplied later.
    """

    rows: Any = None
    weight: Any = None
    scaled: bool = False

    @contextlib.contextmanager
    def replica(self, rows: Any, *, weight: Any = None, scaled: bool = False) -> Iterator[None]:
        """Around one replica's forward and backward pass."""
        self.rows, self.weight, self.scaled = rows, weight, scaled
        try:
            yield
        finally:
            self.rows, self.weight, self.scaled = None, None, False


def is_wrapped(optimizer: Any) -> bool:
    """Whether `apply` was replaced on this object."""
    return is_put(optimizer, "apply")


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
    """Put an `apply` on the object that exchanges first; its class and `get_config` stay Keras' own.

    The optimizer inside a LossScaleOptimizer gets gradients that are reduced already.
    """

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return _apply(backend, optimizer, list(grads), trainable_variables)

    put(optimizer, "apply", apply)
    put(optimizer, "_all_reduce_sum_gradients", list)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        remove(inner, "apply")
        put(inner, "_all_reduce_sum_gradients", list)


def loss_scale(optimizer: Any) -> Any:
    """What the loss is multiplied by and the optimizer divides gradients by: a number or 0-d tensor, None where nothing is."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.convert_to_tensor(optimizer.dynamic_scale.value)
    return optimizer.loss_scale_factor


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
    """Before fit trains with several replicas: raise UnsupportedError unless its optimizer exchanges.

    Under mixed_float16 `compile` puts a LossScaleOptimizer around the wrapped optimizer, which exchanges from then on.
    """
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and is_wrapped(optimizer.inner_optimizer):
        adapt_optimizer(optimizer, backend)
    if backend.num_replicas > 1 and optimizer is not None and not is_wrapped(optimizer):
        raise UnsupportedError(
            f"the model was compiled with a {type(optimizer).__name__} that did not go through wrap_optimizer, so the replicas' gradients "
            "would not be averaged; call model.compile(unidist.wrap_optimizer(optimizer), ...)"
        )


def install_train_step(model: Any, backend: TFBackend) -> None:
    """Keras' (or the user's) `train_step` on this object, with its losses counted locally and the replica's rows as the weight."""
    original = of_class(model, "train_step")

    def train_step(data: Any) -> Any:
        check_compiled(model, backend)
        rows = num_rows(data)
        logs = _counted_step(model, backend, original, data, rows, training=True)
        return _mean_logs(model, backend, logs, rows)

    put(model, "train_step", train_step)


def install_test_step(model: Any, backend: TFBackend) -> None:
    """Likewise `test_step`, where the replicas of a process take the same number of steps: losses count by their own denominators."""
    original = of_class(model, "test_step")

    def test_step(data: Any) -> Any:
        return _counted_step(model, backend, original, data, num_rows(data), training=False)

    put(model, "test_step", test_step)


def install_statistics(model: Any, backend: TFBackend) -> None:
    """BatchNorm's running statistics are the first replica's on all of them, in Keras' evaluate and predict and after its fit.

    Around what `take` has put on the model.
    """

    def before(original: Any, *args: Any, **kwargs: Any) -> Any:
        backend._end_of_pass()
        return original(*args, **kwargs)

    def after(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        backend._end_of_pass()
        return result

    for name, call in (("evaluate", before), ("predict", before), ("fit", after)):
        put(model, name, functools.partial(call, getattr(model, name)))


def _counted_step(model: Any, backend: TFBackend, original: Any, data: Any, rows: tf.Tensor, *, training: bool) -> Any:
    """A step whose losses count by their own denominators; on a replica without a row it leaves the metrics as they were."""
    variables = [] if tf.get_static_value(rows) else [v for metric in model.metrics for v in metric.variables]
    before = [tf.identity(v.value) for v in variables]
    with (
        backend.counting.replica(rows, weight=rows if training else None),
        counted_losses(lambda loss, denominator: _counted(backend, loss, denominator, rows)),
    ):
        logs = original(data)
    for variable, value in zip(variables, before):
        variable.value.assign(tf.where(rows > 0, variable.value, value))
    results = model.get_metrics_result() if variables and isinstance(logs, Mapping) else {}
    return results if results and set(results) == set(logs) else logs


def install_build(model: Any, backend: TFBackend, strategy: Any) -> None:
    """Metrics and losses are built before steps are traced, from the first replica's rows of the first batch.

    Under MirroredStrategy, since Keras' own build takes the mean of the replicas' rows; elsewhere so that the losses of several outputs
    are known (see `_weigh_parts`).
    """

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if strategy is not None or not _is_built(model):
            if iterator is not None:
                data_batch = next(next(data for _, _, data in iterator))
            if strategy is not None and iterator is not None:
                data_batch = keras.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], data_batch)
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                model._symbolic_build(data_batch=data_batch)
        _weigh_parts(model, backend)

    put(model, "_maybe_symbolic_build", build)


def _is_built(model: Any) -> bool:
    return all(part is None or part.built for part in (model._compile_loss, model._compile_metrics))


def _weigh_parts(model: Any, backend: TFBackend) -> None:
    """The logged loss of each output is a mean over samples: Keras weighs it by a number of rows that it lacks in compiled steps."""
    for metric in getattr(model._compile_loss, "metrics", None) or []:

        def update(value: Any, sample_weight: Any = None, update_state: Any = of_class(metric, "update_state")) -> Any:  # noqa: B008
            return update_state(value, sample_weight=backend.counting.rows if sample_weight is None else sample_weight)

        put(metric, "update_state", update)


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
