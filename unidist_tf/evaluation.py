"""Evaluation and prediction on TensorFlow: one graph per model, loss and set of metrics, over this process's replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from unidist.batch import Share
from unidist.nest import map_nest
from unidist_tf.losses import Losses, unpack
from unidist_tf.step import Numbers
from unidist_tf.tensors import as_array
from unidist_tf.traced import Traced

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


def is_metric(metric: Any) -> bool:
    """Whether this is a metric object of Keras."""
    return isinstance(metric, keras.metrics.Metric)


def merge_metric(backend: TFBackend, metric: Any) -> float:
    """The metric of all ranks' samples: its state is a sum of what it counted. Its own state then begins anew."""
    if backend.world.size > 1:
        for variable in metric.variables:
            variable.assign(backend._all_reduce(tf.convert_to_tensor(variable.value), "sum"))
    result = float(metric.result())
    metric.reset_state()
    return result


class Evaluations:
    """The traced functions of `evaluate` and `predict`, the latest few of them."""

    _LIMIT = 8

    def __init__(self, backend: TFBackend) -> None:
        self._backend = backend
        self._numbers = Numbers()
        self._traced: dict[Any, tuple[Any, Traced]] = {}

    def evaluate(
        self, model: Any, batch: Any, share: Share | None, loss: Any, metrics: Mapping[str, Any]
    ) -> dict[str, tuple[float, float]]:
        """(total, weight) by name over this process's share; metric objects are updated with it."""
        functions = {name: metric for name, metric in metrics.items() if not is_metric(metric)}
        objects = [metric for metric in metrics.values() if is_metric(metric)]
        traced = self._find(model, loss, functions)
        sizes = self._backend._sizes(batch, share)
        with self._backend._bounded("evaluate"):
            sums, outputs = traced(batch, self._numbers.vector(sizes))
        if objects and sum(sizes):
            self._update(objects, batch, outputs, sizes)
        return {name: (float(total), float(weight)) for name, (total, weight) in sums.items()}

    def predict(self, model: Any, batch: Any, share: Share | None) -> Any:
        """Outputs of this process's share as NumPy arrays, without borrowed rows."""
        sizes = self._backend._sizes(batch, share)
        inputs = unpack(batch)[0]
        _, outputs = self._find(model, None, {})((inputs,), self._numbers.vector(sizes))
        return _joined(outputs, sizes, lambda pieces: numpy.concatenate([as_array(p) for p in pieces]))

    def _find(self, model: Any, loss: Any, functions: Mapping[str, Callable[..., Any]]) -> Traced:
        key = (id(model), id(loss), tuple((name, id(function)) for name, function in functions.items()))
        if key not in self._traced:
            for old in list(self._traced)[: -self._LIMIT + 1]:
                del self._traced[old]
            losses = Losses(model, loss)
            traced = Traced(lambda batch, sizes: self._graph(losses, loss is not None, functions, batch, sizes))
            self._traced[key] = ((model, loss, functions), traced)  # the objects stay alive, so that no id is another's
        return self._traced[key][1]

    def _graph(self, losses: Losses, has_loss: bool, functions: Mapping[str, Any], batch: Any, sizes: Any) -> Any:
        inputs_only = not has_loss and not functions

        def replica(rows: Any, size: Any) -> Any:
            inputs, targets, sample_weight = unpack(rows)
            outputs = losses.outputs(inputs, training=False)
            sums = {} if inputs_only else _sums(losses, has_loss, functions, outputs, targets, sample_weight, size)
            return sums, outputs

        results = self._backend._spread(replica, batch, sizes)
        totals = {name: tuple(tf.add_n([r[0][name][i] for r in results]) for i in (0, 1)) for name in results[0][0]}
        return totals, [r[1] for r in results]

    def _update(self, objects: list[Any], batch: Any, outputs: Any, sizes: list[int]) -> None:
        _, targets, sample_weight = unpack(batch)
        whole = _joined(outputs, sizes, lambda pieces: tf.concat(pieces, 0))
        for metric in objects:
            self._backend._update_metric(metric, targets, whole, sample_weight)


def _joined(outputs: list[Any], sizes: list[int], concatenate: Callable[[list[Any]], Any]) -> Any:
    """The replicas' outputs as those of the share; each loses its borrowed row."""
    return map_nest(lambda *pieces: concatenate([p[:size] for p, size in zip(pieces, sizes)]), *outputs)


def _sums(
    losses: Losses, has_loss: bool, functions: Mapping[str, Any], outputs: Any, targets: Any, sample_weight: Any, size: Any
) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    if has_loss:
        found["loss"] = tuple(losses.of_outputs(outputs, targets, sample_weight))
    for name, function in functions.items():
        value = tf.convert_to_tensor(function(outputs, targets))
        found[name] = (tf.reduce_mean(value) if value.shape.rank else value, None)
    return {name: _counted(value, weight, size) for name, (value, weight) in found.items()}


def _counted(value: Any, weight: Any, size: Any) -> tuple[Any, Any]:
    """(total, weight) in float64; zeros of a borrowed row."""
    count = tf.cast(size, tf.float64)
    total = tf.cast(value, tf.float64) * (count if weight is None else 1.0)
    weight = count if weight is None else tf.cast(weight, tf.float64)
    return tuple(tf.where(size > 0, x, tf.zeros_like(x)) for x in (total, weight))
