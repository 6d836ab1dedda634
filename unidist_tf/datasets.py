"""What a tf.data.Dataset is made of: whether it batches, splits or shuffles, and its samples, found by walking its inputs.

Private names of TensorFlow that are read: `Dataset._inputs`, class names of datasets, `_BatchDataset._batch_size` and
`_drop_remainder`, `_PaddedBatchDataset._padded_shapes` and `_padding_values`, `_ShuffleDataset._seed` and `_seed2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from unidist.errors import UnsupportedError

_BATCHES = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_MapAndBatchDataset", "_RebatchDataset"}
_FLATTENS = {"_UnbatchDataset", "_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset", "_WindowDataset"}
_PASSES_ON = {"_PrefetchDataset", "_OptionsDataset", "_ModelDataset"}
_ONE_TO_ONE = {*_PASSES_ON, "_MapDataset", "_ParallelMapDataset", "CacheDataset"}


@dataclass(frozen=True)
class Samples:
    """The samples of a dataset, how many there are (None: unknown), how to batch them, and the batch size that it had."""

    dataset: Any
    length: int | None
    batch: Callable[[Any, int], Any]
    had: str = ""


def find_samples(dataset: Any) -> Samples:
    """The samples under a dataset, whether it yields them or batches of them."""
    op = _last_batch(dataset)
    if op is None:
        return Samples(dataset, _cardinality(dataset), _plain)
    between = _names_down_to(dataset, op)
    padded = type(op).__name__ == "_PaddedBatchDataset"
    bare = between is not None and set(between) <= _PASSES_ON and type(op).__name__ not in ("_MapAndBatchDataset", "_RebatchDataset")
    if padded and not bare:
        raise UnsupportedError("a dataset that transforms what padded_batch made can't be cut anew; transform before padded_batch")
    exact = between is not None and set(between) <= _ONE_TO_ONE and type(op).__name__ != "_RebatchDataset"
    samples = op._inputs()[0] if bare else dataset.unbatch()
    had = f"; the dataset's own batch size ({_batch_size(op) or 'not fixed'}) could mean either"
    return Samples(samples, _batched_length(op) if exact else None, _padded(op) if padded else _plain, had)


def is_sharded(dataset: Any) -> bool:
    """Whether a shard operation is in the chain."""
    return any(type(part).__name__ == "_ShardDataset" for part in walk(dataset))


def is_shuffled(dataset: Any) -> bool:
    """Whether a shuffle is in the chain."""
    return any(type(part).__name__ == "_ShuffleDataset" for part in walk(dataset))


def shuffles_freely(dataset: Any) -> bool:
    """Whether a shuffle without any seed is in the chain: every process then has an order of its own."""
    shuffles = [part for part in walk(dataset) if type(part).__name__ == "_ShuffleDataset"]
    return any(int(part._seed) == 0 and int(part._seed2) == 0 for part in shuffles)


def walk(dataset: Any) -> Iterator[Any]:
    """The dataset and all that it is made of."""
    yield dataset
    for part in dataset._inputs():
        yield from walk(part)


def _last_batch(dataset: Any) -> Any:
    """The operation that made batches of what the dataset yields; None when it yields samples."""
    name = type(dataset).__name__
    if name in _BATCHES:
        return dataset
    inputs = dataset._inputs()
    if name in _FLATTENS or not inputs:
        return None
    found = [_last_batch(part) for part in inputs]
    return found[0] if all(part is not None for part in found) else None


def _names_down_to(dataset: Any, op: Any) -> list[str] | None:
    """Class names of the operations after `op`; None where several datasets come together in between."""
    names = []
    while dataset is not op:
        names.append(type(dataset).__name__)
        inputs = dataset._inputs()
        if len(inputs) != 1:
            return None
        dataset = inputs[0]
    return names


def _cardinality(dataset: Any) -> int | None:
    count = int(dataset.cardinality())
    return count if count >= 0 else None


def _batch_size(op: Any) -> int | None:
    size = tf.get_static_value(getattr(op, "_batch_size", None))
    return None if size is None else int(size)


def _batched_length(op: Any) -> int | None:
    """Samples in all batches of `op`; what it drops at the end does not count."""
    size, total = _batch_size(op), _cardinality(op._inputs()[0])
    if size is None or total is None:
        return None
    dropped = tf.get_static_value(getattr(op, "_drop_remainder", None))
    if dropped is None:
        return None
    return total // size * size if dropped else total


def _plain(samples: Any, size: int) -> Any:
    return samples.batch(size)


def _padded(op: Any) -> Callable[[Any, int], Any]:
    return lambda samples, size: samples.padded_batch(size, padded_shapes=op._padded_shapes, padding_values=op._padding_values)
