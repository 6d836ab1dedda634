"""Feeds on TensorFlow: arrays are cut, tf.data is batched anew and cut, other samples are stacked with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from unidist import frameworks
from unidist.batch import Share
from unidist.data import BatchPlan, Plan, ShardedPlan, Source
from unidist.errors import FrameworkMismatchError, MismatchError, UnsupportedError
from unidist.nest import leaves, map_nest
from unidist_tf.datasets import Samples, find_samples, is_sharded, is_shuffled, shuffles_freely
from unidist_tf.tensors import num_rows

if TYPE_CHECKING:
    from unidist_tf.base import TFBackend

Pair = tuple[Share, Any]


def read_source(data: Any, backend: TFBackend, *, shuffle: bool, options: Mapping[str, Any]) -> Source:
    """What kind of data it is, how long, and how its feed is built.

    Raises FrameworkMismatchError for torch's data, TypeError for what can't be iterated.
    """
    if options:
        raise TypeError(f"wrap_data got options {sorted(options)}, which mean nothing on TensorFlow")
    if frameworks.origin(data) == "torch":
        raise FrameworkMismatchError(
            f"a {type(data).__name__} is torch's, but unidist runs tensorflow; give arrays, a tf.data.Dataset or an iterable of samples"
        )
    if isinstance(data, tf.data.Dataset):
        return _dataset_source(data, backend)
    if isinstance(data, keras.utils.PyDataset):
        return _pydataset_source(data, backend)
    if _is_nest(data):
        arrays = map_nest(_as_array, data)
        return Source(_length(arrays), lambda plan: ArrayFeed(arrays, plan, backend))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Source(len(data), lambda plan: SequenceFeed(data, plan, backend))
    if hasattr(data, "__iter__"):
        return Source(None, lambda plan: StreamFeed(data, plan, backend))
    raise TypeError(f"wrap_data can't read a {type(data).__name__}: give arrays, a tf.data.Dataset, a PyDataset or an iterable of samples")


def _dataset_source(data: Any, backend: TFBackend) -> Source:
    if backend.world.size > 1 and shuffles_freely(data):
        raise ValueError(
            "this dataset shuffles without a seed, so each rank would see another order; give shuffle a seed, or leave it out and say "
            "wrap_data(..., shuffle=True)"
        )
    samples = find_samples(data)
    split = "tf.data.shard" if is_sharded(data) else ""
    return Source(samples.length, lambda plan: DatasetFeed(samples, plan, backend), hint=samples.had, split=split)


def _pydataset_source(data: Any, backend: TFBackend) -> Source:
    if data.num_batches is None:
        raise UnsupportedError("a PyDataset without a number of batches has no epochs to share; give it num_batches")
    return Source(data.num_batches, lambda plan: BatchFeed(data, plan, backend), own_batches=True)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (numpy.ndarray, tf.Tensor, tf.Variable, tf.RaggedTensor)) or (
        hasattr(leaf, "__array__") and len(getattr(leaf, "shape", ())) > 0
    )


def _is_nest(data: Any) -> bool:
    """Whether it is an array or tensor, or a tuple or dict of them (a list is a sequence of samples)."""
    return _is_array(data) or (isinstance(data, (tuple, Mapping)) and all(_is_array(leaf) for leaf in leaves(data)))


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, (numpy.ndarray, tf.Tensor, tf.RaggedTensor)):
        return leaf
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else numpy.asarray(leaf)


def _length(arrays: Any) -> int:
    lengths = [int(leaf.shape[0]) for leaf in leaves(arrays)]
    if not lengths:
        raise TypeError("wrap_data got an empty nest of arrays")
    if len(set(lengths)) > 1:
        raise ValueError(f"the arrays have different numbers of rows: {lengths}")
    return lengths[0]


class _Feed:
    """Puts batches on the device."""

    def __init__(self, data: Any, plan: Any, backend: TFBackend) -> None:
        self._data = data
        self._plan: Any = plan
        self._backend = backend

    def _tensors(self, batch: Any) -> Any:
        with self._backend._batch_device():
            return map_nest(lambda leaf: leaf if isinstance(leaf, tf.RaggedTensor) else tf.convert_to_tensor(leaf), batch)

    def _stacked(self, samples: list[Any]) -> Any:
        first, *others = samples
        return self._tensors(map_nest(lambda *values: numpy.stack([numpy.asarray(v) for v in values]), first, *others))


class ArrayFeed(_Feed):
    """Rows of arrays or tensors, consecutive ones by slicing."""

    def iterate(self, epoch: int, start: int) -> Iterator[Pair]:
        plan: Plan = self._plan
        order = plan.order(epoch) if plan.shuffle else None
        for step in range(start, plan.num_steps or 0):
            mine = plan.positions(step)
            begin, stop = (mine.start, mine.stop) if len(mine) else (0, 1)
            rows = slice(begin, stop) if order is None else order[begin:stop]
            yield plan.share(step), self._tensors(map_nest(lambda leaf, rows=rows: _take(leaf, rows), self._data))


def _take(leaf: Any, rows: Any) -> Any:
    if isinstance(rows, slice) or isinstance(leaf, numpy.ndarray):
        return leaf[rows]
    return tf.gather(leaf, rows)


class SequenceFeed(_Feed):
    """Samples by index."""

    def iterate(self, epoch: int, start: int) -> Iterator[Pair]:
        for share, indices in self._plan.indices(epoch, start):
            yield share, self._stacked([self._data[int(index)] for index in indices])


class StreamFeed(_Feed):
    """Samples of any iterable, read whole by every process; a generator lasts for one epoch."""

    _used = False

    def iterate(self, epoch: int, start: int) -> Iterator[Pair]:
        items = iter(self._data)
        if items is self._data:
            if self._used:
                raise ValueError(
                    "a generator can be read once, for one epoch; give an iterable that begins anew, or a function's result each time"
                )
            self._used = True
        for step, (share, samples) in enumerate(self._plan.batches(items)):
            if step >= start:
                yield share, self._stacked(samples)


class BatchFeed(_Feed):
    """The batches of a PyDataset, each a global one, cut where they are read."""

    def iterate(self, epoch: int, start: int) -> Iterator[Pair]:
        plan: BatchPlan = self._plan
        order = plan.order(epoch)
        for step in range(start, len(order)):
            batch = self._data[int(order[step])]
            share = plan.cut(num_rows(batch), step == len(order) - 1)
            yield share, self._tensors(_own_rows(batch, share))
        self._data.on_epoch_end()


def _own_rows(batch: Any, share: Share) -> Any:
    """This process's rows of a global batch; one borrowed row for an empty share."""
    begin = sum(share.sizes[: share.first]) if share.size else 0
    return map_nest(lambda leaf: leaf[begin : begin + max(share.size, 1)], batch)


class DatasetFeed(_Feed):
    """tf.data: every process reads all samples and keeps its share, so that it doesn't matter how many files there are."""

    def __init__(self, samples: Samples, plan: Plan, backend: TFBackend) -> None:
        super().__init__(samples.dataset, plan, backend)
        self._samples = samples
        self._passes = 0 if is_shuffled(samples.dataset) else None
        if isinstance(plan, ShardedPlan):
            self._batches = samples.batch(samples.dataset, max(plan.local_batch, 1)).prefetch(1)
        else:
            self._batches = samples.batch(samples.dataset, plan.global_batch).prefetch(1)

    def _count_passes(self, epoch: int) -> None:
        """A shuffle of the data set's own gives its n-th pass in a process an order of its own: a resumed epoch has to be that pass."""
        if self._passes is not None:
            for _ in range(epoch - self._passes):
                iter(self._data)
            self._passes = max(self._passes, epoch) + 1

    def iterate(self, epoch: int, start: int) -> Iterator[Pair]:
        plan = self._plan
        self._count_passes(epoch)
        if plan.shuffle:
            return self._shuffled(epoch, start)
        if plan.num_steps is None and isinstance(plan, ShardedPlan):
            return self._agreed(start)
        return self._sharded(start) if isinstance(plan, ShardedPlan) else self._whole(start)

    def _whole(self, start: int) -> Iterator[Pair]:
        """Global batches in order, each cut; one is read ahead to know the last where the length is unknown."""
        plan, batches = self._plan, iter(self._batches.skip(start))
        step, batch = start, next(batches, None)
        while batch is not None and not (plan.drop_last and num_rows(batch) < plan.global_batch):
            following = next(batches, None)
            ends = following is None or (plan.drop_last and num_rows(following) < plan.global_batch)
            share = plan.cut(num_rows(batch), ends)
            yield share, self._tensors(_own_rows(batch, share))
            step, batch = step + 1, following
        if plan.num_steps not in (None, max(step, start)):
            raise MismatchError(f"the dataset said {plan.num_samples} samples, {plan.num_steps} steps, but ended after {step}")

    def _sharded(self, start: int) -> Iterator[Pair]:
        """This process's own batches; the first row again when the others have more."""
        batches = iter(self._batches.skip(start))
        for step in range(start, self._plan.num_steps):
            share = self._plan.share(step)
            batch = next(batches) if share.size else next(iter(self._batches))
            yield share, self._tensors(map_nest(lambda leaf, n=share.size: leaf[: max(n, 1)], batch))

    def _agreed(self, start: int) -> Iterator[Pair]:
        for step, (share, samples) in enumerate(self._plan.batches(iter(self._data))):
            if step >= start:
                yield share, self._tensors(map_nest(lambda *values: tf.stack(values), *samples))

    def _shuffled(self, epoch: int, start: int) -> Iterator[Pair]:
        """One pass over the data, which keeps this process's samples; then they come in the epoch's order."""
        pairs = list(self._plan.indices(epoch, start))
        mine = numpy.zeros(self._plan.num_samples, bool)
        mine[[index for _, indices in pairs for index in indices]] = True
        wanted = tf.constant(mine)
        kept = self._data.enumerate().filter(lambda index, *sample: tf.gather(wanted, index))
        found = {int(pair[0]): pair[1] for pair in kept}
        for share, indices in pairs:
            yield share, self._tensors(map_nest(lambda *values: tf.stack(values), *(found[int(index)] for index in indices)))
