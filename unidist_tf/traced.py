"""Functions of a batch, traced once: the first axis is free, another one becomes free when it is seen to vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from unidist.nest import map_nest, paths
from unidist_tf.tensors import as_batch

Specs = list[tf.TensorSpec]


class Traced:
    """`function(batch, *numbers)` as graphs; numbers are tensors, so that no value of theirs makes a new trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.num_traces = 0
        self._function = function
        self._graphs: dict[Any, tuple[Specs, Any]] = {}

    def __call__(self, batch: Any, *numbers: tf.Tensor) -> Any:
        batch = map_nest(as_batch, batch)
        places = paths(batch)
        tensors = [leaf for _, leaf in places if leaf is not None]
        key = tuple((place, None if leaf is None else leaf.dtype) for place, leaf in places)
        specs, graph = self._graphs.get(key, ([], None))
        if graph is None or not all(spec.shape.is_compatible_with(t.shape) for spec, t in zip(specs, tensors)):
            specs = [_spec(t, spec) for t, spec in zip(tensors, specs or [None] * len(tensors))]
            graph = self._trace(batch, specs, numbers)
            self._graphs[key] = (specs, graph)
        return graph(tensors, numbers)

    def _trace(self, batch: Any, specs: Specs, numbers: tuple[tf.Tensor, ...]) -> Any:
        self.num_traces += 1
        template = map_nest(lambda leaf: leaf is not None, batch)

        def graph(tensors: list[tf.Tensor], numbers: tuple[tf.Tensor, ...]) -> Any:
            found = iter(tensors)
            return self._function(map_nest(lambda there: next(found) if there else None, template), *numbers)

        # Users' control flow stays as written, as in Keras' own steps: a function of theirs may be a tf.function itself.
        function = tf.function(graph, autograph=False)
        return function.get_concrete_function(specs, tuple(tf.TensorSpec(n.shape, n.dtype) for n in numbers))


def _spec(tensor: tf.Tensor, before: tf.TensorSpec | None) -> tf.TensorSpec:
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        return tf.type_spec_from_value(tensor)
    shape = tensor.shape.as_list()
    if shape:
        shape[0] = None
    if before is not None:
        shape = [a if a == b else None for a, b in zip(shape, before.shape.as_list())]
    return tf.TensorSpec(shape, tensor.dtype)
