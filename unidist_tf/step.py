"""The training step on TensorFlow: one graph per batch; with accumulation one for a batch and one for the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from unidist.base import Step, StepOptions
from unidist.batch import Share
from unidist_tf import gradients as grads
from unidist_tf import state
from unidist_tf.keras import apply_reduced
from unidist_tf.losses import Counted, Losses
from unidist_tf.traced import Traced

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


class TFStep(Step):
    """A step over Keras models or a `tf.Module` with an optimizer of Keras.

    Sizes and scales go into the graph as tensors, and the first axis of a batch is free: an uneven batch is no new trace.
    """

    def __init__(self, backend: TFBackend, model: Any, optimizer: Any, options: StepOptions) -> None:
        super().__init__(backend, model, options)
        self._tf = backend
        self._optimizer = optimizer
        self._variables = state.trainable(model)
        self._losses_of = Losses(model, options.loss, options.compute_loss)
        self._numbers = Numbers()
        self._whole = Traced(self._step)
        self._part = Traced(self._accumulate)
        self._finish = tf.function(self._update, autograph=False)
        self._held = Accumulators(self._variables) if options.accumulation > 1 else None
        self._weighted = False

    @property
    def num_traces(self) -> int:
        """How many graphs were traced for batches; 1 while they differ in their number of rows only."""
        return self._whole.num_traces + self._part.num_traces

    def _run(self, batch: Any, share: Share | None, factor: float) -> tuple[Any, Any]:
        sizes = self._tf._sizes(batch, share)
        scale = factor / (self._tf.world.size * max(sum(sizes), 1))
        numbers = self._numbers.vector(sizes), self._numbers.scalar(scale)
        with self._tf._bounded("the training step"):
            if self._held is None:
                loss, weight, self.last_norm = self._whole(batch, *numbers)
            else:
                loss, weight = self._part(batch, *numbers)
                if self._window.complete:
                    self.last_norm = self._finish(self._numbers.scalar(self._window.correction))
        return loss, weight

    def _to_floats(self, pairs: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        if not pairs:
            return []
        losses, weights = tf.stack([loss for loss, _ in pairs]), tf.stack([weight for _, weight in pairs])
        return list(zip(losses.numpy().tolist(), weights.numpy().tolist()))

    # graphs

    def _step(self, batch: Any, sizes: Any, scale: Any) -> Any:
        results = self._tf._spread(self._step_replica, batch, sizes, scale)
        return (*_mean(results), *([results[0][2]] if len(results[0]) > 2 else [None]))

    def _step_replica(self, batch: Any, size: Any, scale: Any) -> tuple[Any, ...]:
        counted, gradients = self._gradients(batch, size, scale)
        weight = counted.weight
        gradients, total = self._tf._sum(gradients, weight, self._variables)
        if weight is not None:
            gradients = grads.divided(gradients, total)
        return (*_sums(counted, size), *self._apply(gradients))

    def _accumulate(self, batch: Any, sizes: Any, scale: Any) -> Any:
        return _mean(self._tf._spread(self._accumulate_replica, batch, sizes, scale))

    def _accumulate_replica(self, batch: Any, size: Any, scale: Any) -> tuple[Any, Any]:
        counted, gradients = self._gradients(batch, size, scale)
        self._weighted = counted.weight is not None
        assert self._held is not None
        self._held.add(gradients, counted.weight)
        return _sums(counted, size)

    def _update(self, correction: Any) -> Any:
        norms = self._tf._on_replicas(self._update_replica, correction)
        return norms[0][0] if norms[0] else None

    def _update_replica(self, correction: Any) -> tuple[Any, ...]:
        assert self._held is not None
        gradients, weight = self._held.take()
        gradients, total = self._tf._sum(gradients, weight if self._weighted else None, self._variables)
        if self._weighted:
            gradients = grads.divided(gradients, total)
        else:
            gradients = grads.each(lambda g: g * tf.cast(correction, g.dtype), gradients)
        return self._apply(gradients)

    def _gradients(self, batch: Any, size: Any, scale: Any) -> tuple[Counted, list[Any]]:
        """The loss of one replica, and the gradients of what it adds to the loss of the window; zeros for a borrowed row."""
        self._tf.counting.scaled, self._tf.counting.rows = True, size
        with tf.GradientTape() as tape:
            value, weight = self._losses_of.of_batch(batch)
            part = value * tf.cast(scale * tf.cast(size, scale.dtype), value.dtype) if weight is None else value
        gradients = tape.gradient(part, [state.raw(variable) for variable in self._variables])
        self._tf.counting.scaled, self._tf.counting.rows = False, None
        if self._tf.num_replicas > 1:
            gradients = grads.kept_if(size > 0, gradients)
        if weight is not None:
            weight = tf.where(size > 0, weight, tf.zeros_like(weight))
        return Counted(value, weight), gradients

    def _apply(self, gradients: list[Any]) -> tuple[Any, ...]:
        """The update; the norm of the gradients before they were clipped, when they were."""
        gradients, norm = grads.clip(gradients, self._options.clip_norm, self._options.clip_value)
        apply_reduced(self._optimizer, gradients, self._variables)
        return () if norm is None else (norm,)


def _sums(counted: Counted, size: Any) -> tuple[Any, Any]:
    """(total, weight) of one replica; zeros of a borrowed row."""
    value, weight = counted
    total = value * tf.cast(size, value.dtype) if weight is None else value
    return tf.where(size > 0, total, tf.zeros_like(total)), tf.cast(size if weight is None else weight, tf.float64)


def _mean(results: list[tuple[Any, ...]]) -> tuple[Any, Any]:
    """The mean over this process's replicas and its weight; 0.0 without a sample."""
    total, weight = tf.add_n([r[0] for r in results]), tf.add_n([r[1] for r in results])
    return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype)), weight


class Accumulators:
    """Each replica's own sums of gradients and weights over a window."""

    def __init__(self, variables: list[Any]) -> None:
        self._sums = [_local_sum(state.raw(v).shape, state.raw(v).dtype) for v in variables]
        wide = any(v.dtype == tf.float64 for v in self._sums)
        self._weight = _local_sum([], tf.float64 if wide else tf.float32)
        self._used: set[int] = set()

    def add(self, gradients: list[Any], weight: Any) -> None:
        """Add one batch's."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._used.add(index)
                self._sums[index].assign_add(tf.convert_to_tensor(gradient))
        if weight is not None:
            self._weight.assign_add(tf.cast(weight, self._weight.dtype))

    def take(self) -> tuple[list[Any], Any]:
        """The sums, None where no batch had a gradient; they begin anew."""
        sums = [tf.convert_to_tensor(v) if i in self._used else None for i, v in enumerate(self._sums)]
        weight = tf.convert_to_tensor(self._weight)
        for variable in [*self._sums, self._weight]:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        return sums, weight


def _local_sum(shape: Any, dtype: Any) -> Any:
    zeros = tf.zeros(shape, dtype)
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    return tf.Variable(zeros, trainable=False, synchronization=on_read, aggregation=total)


class Numbers:
    """Host tensors of numbers that come again and again."""

    _LIMIT = 1000

    def __init__(self) -> None:
        self._known: dict[Any, tf.Tensor] = {}

    def scalar(self, value: float) -> tf.Tensor:
        """0-d float64."""
        return self._get(value, value, tf.float64)

    def vector(self, values: list[int]) -> tf.Tensor:
        """1-d int32."""
        return self._get(tuple(values), values, tf.int32)

    def _get(self, key: Any, value: Any, dtype: tf.DType) -> tf.Tensor:
        if key not in self._known:
            if len(self._known) >= self._LIMIT:
                self._known.clear()
            with tf.device("CPU:0"):
                self._known[key] = tf.constant(value, dtype)
        return self._known[key]
