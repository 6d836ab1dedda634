"""Feeds on TensorFlow: arrays are cut, tf.data is batched anew and cut, other samples are stacked with NumPy."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy
import tensorflow as tf

from unidist import frameworks
from unidist.batch import Share
from unidist.data import Source
from unidist.errors import FrameworkMismatchError, MismatchError, UnsupportedError
from unidist.nest import leaves, map_nest
from unidist.plans import BatchPlan, GlobalPlan, Plan, ShardedPlan
from unidist.streams import global_generators, in_step, repeatable
from unidist_tf.datasets import Samples, find_samples, is_sharded, shuffles_freely, sources
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
    if isinstance(data, tf.distribute.DistributedDataset):
        raise TypeError(
            "this dataset is dealt out by a strategy already (experimental_distribute_dataset); give the tf.data.Dataset itself"
        )
    if isinstance(data, keras.utils.PyDataset):
        return _pydataset_source(data, backend)
    if _is_nest(data):
        arrays = map_nest(_as_array, data)
        return Source(_length(arrays), lambda plan: ArrayFeed(arrays, plan, backend), content=lambda: _content(leaves(arrays)))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Source(len(data), lambda plan: SequenceFeed(data, plan, backend), content=lambda: _content_of_list(data))
    if hasattr(data, "__iter__"):
        return Source(None, lambda plan: StreamFeed(data, plan, backend))
    raise TypeError(f"wrap_data can't read a {type(data).__name__}: give arrays, a tf.data.Dataset, a PyDataset or an iterable of samples")


def _dataset_source(data: Any, backend: TFBackend) -> Source:
    samples = find_samples(data)
    unordered = (
        "this dataset shuffles without a seed, so each rank would see another order; give shuffle a seed, or leave it out and say "
        "wrap_data(..., shuffle=True)"
    )
    return Source(
        samples.length, lambda plan: DatasetFeed(samples, plan, backend), hint=samples.had, drop_last=samples.drops,
        split="tf.data.shard" if is_sharded(data) else "", unordered=unordered if shuffles_freely(data) else "",
        content=lambda: None if (found := sources(data)) is None else _content(found),
    )  # fmt: skip


def _content(arrays: list[Any]) -> int:
    """A number for the first and last rows."""
    return zlib.crc32(repr([_ends(array) for array in arrays]).encode())


def _content_of_list(data: Any) -> int | None:
    """For a list of numbers, texts and arrays; other sequences may compute their samples, which may be random."""
    rows = leaves([*data[:1], *data[-1:]]) if isinstance(data, list) else [None]
    return _content(rows) if all(_is_array(row) or isinstance(row, (int, float, str, bytes, numpy.generic)) for row in rows) else None


def _ends(leaf: Any) -> Any:
    if not _is_array(leaf):
        return repr(numpy.asarray(leaf).tolist())
    rows = [leaf[:1], leaf[-1:]] if len(leaf.shape) else [leaf]
    if isinstance(leaf, tf.RaggedTensor):
        return repr([row.to_list() for row in rows])
    ends = [numpy.asarray(row) for row in rows]
    return repr([end.tolist() for end in ends]) if ends[0].dtype.hasobject else zlib.crc32(b"".join(end.tobytes() for end in ends))


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
        if isinstance(self._data, Iterator):
            if self._used:
                raise ValueError(
                    "a generator can be read once, for one epoch; give an iterable that begins anew, or a function's result each time"
                )
            self._used = True
        plan = self._plan
        part = () if isinstance(plan, GlobalPlan) else (plan.first,)
        steps = repeatable(lambda: plan.batches(iter(self._data)), global_generators(), plan.seed, epoch, *part)
        for step, (share, samples) in enumerate(in_step(plan.control if isinstance(plan, GlobalPlan) else None, steps)):
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
        self._reshuffles, self._passes = samples.reshuffles, 0
        if isinstance(plan, ShardedPlan):
            self._batches = samples.batch(samples.dataset, max(plan.local_batch, 1)).prefetch(1)
        else:
            self._batches = samples.batch(samples.dataset, plan.global_batch).prefetch(1)

    def iterate(self, epoch: int, start: int) -> Iterator[Pair]:
        plan = self._plan
        while self._reshuffles and self._passes < epoch:  # its order is another in each of its passes
            iter(self._batches)
            self._passes += 1
        self._passes += 1
        if plan.shuffle:
            return self._shuffled(epoch, start)
        if isinstance(plan, ShardedPlan):
            return self._agreed(start) if plan.num_steps is None else self._sharded(start)
        if plan.num_steps is None:
            pairs = in_step(plan.control, self._whole(start))
        else:
            pairs = self._whole(start)
        return ((share, self._tensors(batch)) for share, batch in pairs)

    def _whole(self, start: int) -> Iterator[Pair]:
        """Global batches in order, each cut; one is read ahead to know the last where the length is unknown."""
        plan, batches = self._plan, iter(self._batches.skip(start) if start else self._batches)
        step, batch = start, next(batches, None)
        while batch is not None and not (plan.drop_last and num_rows(batch) < plan.global_batch):
            following = next(batches, None)
            ends = following is None or (plan.drop_last and num_rows(following) < plan.global_batch)
            share = plan.cut(num_rows(batch), ends)
            yield share, _own_rows(batch, share)
            step, batch = step + 1, following
        if plan.num_steps not in (None, max(step, start)):
            raise MismatchError(f"the dataset said {plan.num_samples} samples, {plan.num_steps} steps, but ended after {step}")

    def _sharded(self, start: int) -> Iterator[Pair]:
        """This process's own batches; a row of the last one again when the others have more."""
        plan, batches = self._plan, iter(self._batches.skip(start) if start else self._batches)
        batch = None
        for step in range(start, plan.num_steps):
            share = plan.share(step)
            if share.size or batch is None:
                batch = next(batches if share.size else iter(self._batches))
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
