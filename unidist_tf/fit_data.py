"""TensorFlow's own data for Keras' fit: a data set's batches are the global ones, and each process takes its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from unidist.agreement import check_same
from unidist.data import Data
from unidist.errors import UnsupportedError
from unidist_keras.datasets import SPLIT_ALREADY, Passes, Shares, of_data, told_by
from unidist_tf.datasets import is_sharded, shuffles_freely, walk

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend


def fit_data(backend: TFBackend, data: Any) -> Shares | None:
    """Shares of a tf.data.Dataset or of what `wrap_data` gave; None for anything else.

    Raises ValueError for a data set that is sharded, or shuffled without a seed, MismatchError for one that differs between ranks.
    """
    if isinstance(data, tf.data.Dataset):
        return Shares(_rows_of(backend, data))
    return of_data(data, _dataset(data)) if isinstance(data, Data) else None


def _rows_of(backend: TFBackend, dataset: Any) -> Any:
    if is_sharded(dataset):
        raise ValueError(f"this data set is split by tf.data.shard already; give the whole one; {SPLIT_ALREADY}")
    if shuffles_freely(dataset):
        raise ValueError("this data set shuffles without a seed, so each rank would see another order; give shuffle a seed")
    if any(spec.shape.rank == 0 for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)):
        raise UnsupportedError("fit takes a tf.data.Dataset of batches, not of single numbers: call dataset.batch(global_batch_size) first")
    rows = [["elements", str(dataset.element_spec)], ["number of batches", int(dataset.cardinality())], *_first(dataset)]
    check_same(backend.control, f"the tf.data.Dataset given to fit, evaluate or predict ({SPLIT_ALREADY})", rows)
    rank, size = backend.world.rank, backend.world.size
    return dataset.map(lambda *batch: _part(batch if len(batch) > 1 else batch[0], rank, size), num_parallel_calls=tf.data.AUTOTUNE)


def _first(dataset: Any) -> list[list[Any]]:
    """The targets of the first batch, where looking at it changes nothing: a shuffled data set is in another order the next time."""
    if any(type(part).__name__ == "_ShuffleDataset" for part in walk(dataset)):
        return []
    batch = next(iter(dataset.take(1)), None)
    return [] if batch is None else [["the first batch's targets", str(tf.nest.map_structure(_text, told_by(batch)))]]


def _text(array: Any) -> str:
    return f"{array.shape} {array[:1].tolist()} {array[-1:].tolist()}"


def _part(batch: Any, rank: int, size: int) -> Any:
    total = tf.shape(tf.nest.flatten(batch)[0])[0]
    small, extra = total // size, total % size
    begin = rank * small + tf.minimum(rank, extra)
    stop = begin + small + tf.cast(rank < extra, total.dtype)
    return tf.nest.map_structure(lambda leaf: leaf[begin:stop], batch)


def _dataset(data: Data) -> Any:
    """The batches of this process as a data set; the first one tells the shapes."""
    passes = Passes(data)
    first = next(iter(passes), None)
    if first is None:
        raise ValueError("the data has no batch")
    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), _plain(first))
    dataset = tf.data.Dataset.from_generator(lambda: (_plain(batch) for batch in passes), output_signature=spec)
    steps = data.plan.num_steps
    return dataset if steps is None else dataset.apply(tf.data.experimental.assert_cardinality(steps))


def _plain(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else batch
