"""The bench of Keras models on TensorFlow, with what is TensorFlow's own; imported in workers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import unidist
from unidist.batch import Share
from unidist.testing.keras_bench import KerasBench


class TFBench(KerasBench):
    """Keras models; `tf` is the framework's module."""

    tf = tf

    def trace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a traced one."""
        return tf.function(function, autograph=False)  # type: ignore[no-any-return]

    def on_replicas(self, function: Callable[[Any], list[Any]], *, reduce: bool) -> list[list[Any]]:
        """What `function(index of the replica)` gives on each of this process's replicas, its list reduced when asked for."""
        first = self.rank * self.local_replicas

        def replica() -> list[Any]:
            values = function(first + self._index())
            return unidist.reduce_gradients(values, weight=1.0) if reduce else values

        return self._run(replica)

    def own_step(self, model: Any, optimizer: Any, loss: Any, *, reduce: bool) -> Callable[[Any, Any, Share], None]:
        """A traced step of a user's own: (inputs, targets, share) of this process; reduce: before apply, by the rows of each replica."""
        variables = model.trainable_variables

        def replica(x: Any, y: Any, sizes: Any) -> None:
            begin = tf.minimum(tf.reduce_sum(sizes[: self._index()]), tf.shape(x)[0] - 1)
            rows = sizes[self._index()]
            mine = slice(begin, begin + tf.maximum(rows, 1))
            with tf.GradientTape() as tape:
                value = loss(model(x[mine], training=True), y[mine])
            gradients = tape.gradient(value, [variable.value for variable in variables])
            optimizer.apply(unidist.reduce_gradients(gradients, weight=rows) if reduce else gradients, variables)

        traced = tf.function(lambda *given: self._run(replica, *given), autograph=False, reduce_retracing=True)
        return lambda x, y, share: traced(x, y, tf.constant(share.local_sizes))

    def _index(self) -> Any:
        """Which of this process's replicas calls."""
        return tf.distribute.get_replica_context().replica_id_in_sync_group if self.local_replicas > 1 else 0

    def _run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """The function's result on each of this process's replicas."""
        if self.local_replicas == 1:
            return [function(*given)]
        strategy = unidist.current().strategy
        results = strategy.run(function, args=given)
        if results is None:
            return []
        return [
            [None if value is None else strategy.experimental_local_results(value)[index] for value in results]
            for index in range(self.local_replicas)
        ]
