"""Feeds on PyTorch: arrays are cut, data sets go through a DataLoader that is built once, streams are dealt out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.distributed import DistributedSampler

from unidist import frameworks
from unidist.batch import Share
from unidist.data import BatchPlan, Feed, Plan, Source
from unidist.errors import FrameworkMismatchError, UnsupportedError
from unidist.nest import leaves, map_nest

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend

_LOADER_SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "pin_memory_device",
)  # fmt: skip


def read_source(data: Any, backend: TorchBackend, *, shuffle: bool, options: Mapping[str, Any]) -> Source:
    """What kind of data it is, how long, and how its feed is built.

    Raises FrameworkMismatchError for tf.data, TypeError for what can't be iterated.
    """
    device = backend.device
    if frameworks.origin(data) == "tensorflow":
        raise FrameworkMismatchError(f"a {type(data).__name__} is TensorFlow's, but unidist runs torch; give arrays or a torch Dataset")
    if isinstance(data, DataLoader):
        return _loader_source(data, device, options)
    if _is_pydataset(data):
        return Source(len(data), lambda plan: BatchFeed(data, plan, device), own_batches=True)
    if isinstance(data, IterableDataset):
        return Source(None, lambda plan: StreamFeed(data, plan, device, dict(options)))
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not _is_nest(data)):
        length = len(data)  # type: ignore[arg-type]
        return Source(length, lambda plan: LoaderFeed(data, plan, device, dict(options), None))
    if _is_nest(data):
        _refuse_options(options, "arrays")
        return Source(_rows(data), lambda plan: ArrayFeed(data, plan, device))
    if hasattr(data, "__iter__"):
        return Source(None, lambda plan: StreamFeed(data, plan, device, dict(options)))
    raise TypeError(f"wrap_data can't read a {type(data).__name__}: give arrays, a Dataset, a DataLoader or an iterable of samples")


def _is_pydataset(data: Any) -> bool:
    return frameworks.is_keras(data) and hasattr(data, "__getitem__")


def _is_nest(data: Any) -> bool:
    """Whether it is an array or tensor, or a tuple or dict of them (a list is a sequence of samples)."""
    if isinstance(data, (numpy.ndarray, torch.Tensor)):
        return True
    return isinstance(data, (tuple, Mapping)) and all(isinstance(leaf, (numpy.ndarray, torch.Tensor)) for leaf in leaves(data))


def _rows(data: Any) -> int:
    lengths = [len(leaf) for leaf in leaves(data)]
    if not lengths:
        raise TypeError("wrap_data got an empty nest of arrays")
    if len(set(lengths)) > 1:
        raise ValueError(f"the arrays have different numbers of rows: {lengths}")
    return lengths[0]


def _refuse_options(options: Mapping[str, Any], what: str) -> None:
    if options:
        raise TypeError(f"wrap_data got options {sorted(options)}, which mean nothing for {what}")


def _loader_source(loader: DataLoader[Any], device: torch.device, options: Mapping[str, Any]) -> Source:
    """A user's DataLoader: its data set and settings stay, its order is kept, its batches are cut anew."""
    settings = {name: getattr(loader, name) for name in _LOADER_SETTINGS if getattr(loader, name, None) is not None}
    settings = {**settings, "persistent_workers": loader.num_workers > 0, **options}
    hint = f"; the loader's batch_size={loader.batch_size} could mean either" if loader.batch_size else ""
    if isinstance(loader.dataset, IterableDataset):
        return Source(None, lambda plan: StreamFeed(loader.dataset, plan, device, settings), hint=hint)
    if loader.batch_size is None and type(loader.batch_sampler) is not BatchSampler and loader.batch_sampler is not None:
        raise UnsupportedError("a DataLoader with a batch_sampler of its own can't be cut anew; give its data set and its sampler")
    if loader.batch_sampler is None:
        raise UnsupportedError("a DataLoader with batch_size=None yields whole batches; give its data set of samples to wrap_data")
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return Source(
            len(sampler), lambda plan: LoaderFeed(loader.dataset, plan, device, settings, sampler), split="DistributedSampler", hint=hint
        )
    plain = type(sampler) in (SequentialSampler, RandomSampler) and not getattr(sampler, "replacement", False)
    if plain:
        length = len(loader.dataset)  # type: ignore[arg-type]
        shuffled = isinstance(sampler, RandomSampler)
        return Source(length, lambda plan: LoaderFeed(loader.dataset, plan, device, settings, None), shuffle=shuffled, hint=hint)
    length = len(sampler)  # type: ignore[arg-type]
    return Source(length, lambda plan: LoaderFeed(loader.dataset, plan, device, settings, sampler), shuffle=False, hint=hint)


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on the device, arrays as tensors; the nest's types stay."""
    return map_nest(lambda leaf: _moved(leaf, device), batch)


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, numpy.ndarray):
        leaf = torch.from_numpy(leaf)
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


class ArrayFeed:
    """Rows of arrays or tensors, picked by index; consecutive ones without a copy where the order is theirs."""

    def __init__(self, data: Any, plan: Plan, device: torch.device) -> None:
        self._data = map_nest(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, numpy.ndarray) else leaf, data)
        self._plan = plan
        self._device = device

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        shuffle = self._plan.shuffle
        for share, indices in self._plan.indices(epoch, start):
            rows = torch.from_numpy(indices) if shuffle else slice(int(indices[0]), int(indices[-1]) + 1)
            yield share, map_nest(lambda leaf: leaf[rows].to(self._device, non_blocking=True), self._data)


class _Steps:
    """The batch sampler of one worker pool: the indices of an epoch, which is set before each iteration."""

    def __init__(self, plan: Plan, sampler: Any) -> None:
        self.epoch, self.start = 0, 0
        self._plan = plan
        self._sampler = sampler

    def pairs(self) -> Iterator[tuple[Share, list[int]]]:
        """(share, indices) of the epoch; a user's sampler is drawn from with the same random state on every rank."""
        order = None if self._sampler is None else _drawn(self._sampler, self._plan.seed, self.epoch)
        for share, indices in self._plan.indices(self.epoch, self.start, order):
            yield share, [int(index) for index in indices]

    def __iter__(self) -> Iterator[list[int]]:
        return (indices for _, indices in self.pairs())


def _drawn(sampler: Any, seed: int, epoch: int) -> Any:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    mixed = seed + 7919 * epoch
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(mixed)
        return numpy.array(list(sampler), dtype=numpy.int64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed)
        return numpy.array(list(sampler), dtype=numpy.int64)


class _Seeded:
    """A generator for a loader's passes, so that beginning one draws nothing from the stream that dropout uses; the user's own stays."""

    def __init__(self, plan: Plan, settings: dict[str, Any]) -> None:
        self._plan = plan
        self._own = torch.Generator() if settings.get("generator") is None else None
        if self._own is not None:
            settings["generator"] = self._own

    def begin(self, epoch: int, start: int) -> None:
        """Derived from this process's seed and the position; other workers' streams follow from it."""
        if self._own is not None:
            text = f"{torch.initial_seed()} {self._plan.seed} {self._plan.first} {epoch} {start}"
            self._own.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


class LoaderFeed:
    """A map-style data set through one DataLoader for all epochs; its workers persist."""

    def __init__(self, dataset: Any, plan: Plan, device: torch.device, settings: dict[str, Any], sampler: Any) -> None:
        refused = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & set(settings)
        if refused:
            raise TypeError(f"{sorted(refused)} are unidist's to set; use wrap_data's own arguments")
        if settings.get("num_workers", 0):
            settings.setdefault("persistent_workers", True)
        self._steps = _Steps(plan, sampler)
        self._seeded = _Seeded(plan, settings)
        self._device = device
        self._loader = DataLoader(dataset, batch_sampler=self._steps, **settings)  # type: ignore[arg-type]

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        self._steps.epoch, self._steps.start = epoch, start
        self._seeded.begin(epoch, start)
        shares = (share for share, _ in self._steps.pairs())
        for share, batch in zip(shares, self._loader):
            yield share, to_device(batch, self._device)


class _Dealt(IterableDataset[Any]):
    """A stream's batches of this process; worker w of W makes those of steps w, w + W, ...

    The user's data set must not split by worker as well, so it does not see that it runs in one.
    """

    def __init__(self, stream: Any, plan: Plan, collate: Any) -> None:
        self.start = 0
        self._stream = stream
        self._plan = plan
        self._collate = collate

    def __iter__(self) -> Iterator[tuple[Share, Any]]:
        worker = torch_worker._worker_info
        step, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        torch_worker._worker_info = None
        try:
            for number, (share, items) in enumerate(self._plan.batches(iter(self._stream))):
                if number >= self.start and (number - self.start) % stride == step:
                    yield share, self._collate(items)
        finally:
            torch_worker._worker_info = worker


class StreamFeed:
    """A stream of samples: every process reads all of it and keeps its share, so no length is needed."""

    def __init__(self, stream: Any, plan: Plan, device: torch.device, settings: dict[str, Any]) -> None:
        collate = settings.pop("collate_fn", None) or default_collate
        if settings.get("num_workers", 0):
            settings.setdefault("persistent_workers", False)  # a new epoch's start has to reach the workers
            settings["persistent_workers"] = False
            if hasattr(plan, "lengths"):
                raise UnsupportedError("a stream that is split already can't be read by worker processes; num_workers=0")
        self._device = device
        self._seeded = _Seeded(plan, settings)
        self._dealt = _Dealt(stream, plan, collate)
        self._loader = DataLoader(self._dealt, batch_size=None, collate_fn=_unchanged, **settings)

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        self._dealt.start = start
        self._seeded.begin(epoch, start)
        for share, batch in self._loader:
            yield share, to_device(batch, self._device)


def _unchanged(batch: Any) -> Any:
    return batch


class BatchFeed:
    """A Keras PyDataset: each of its batches is a global one, of which this process takes its rows."""

    def __init__(self, dataset: Any, plan: Plan, device: torch.device) -> None:
        if not isinstance(plan, BatchPlan):
            raise UnsupportedError("a PyDataset makes whole global batches")
        self._dataset = dataset
        self._plan = plan
        self._device = device

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        order = self._plan.order(epoch)
        for step in range(start, len(order)):
            batch = self._dataset[int(order[step])]
            share = self._plan.cut(len(leaves(batch)[0]), step == len(order) - 1)
            begin = sum(share.sizes[: share.first])
            rows = slice(begin, begin + share.size) if share.size else slice(0, 1)
            yield share, to_device(map_nest(lambda leaf: numpy.asarray(leaf)[rows], batch), self._device)
        if hasattr(self._dataset, "on_epoch_end"):
            self._dataset.on_epoch_end()


__all__ = ["Feed", "read_source", "to_device"]
