"""Feeds on PyTorch: arrays are cut, data sets go through a DataLoader that is built once, streams are dealt out."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)  # fmt: skip
from torch.utils.data._utils import worker as torch_worker

from unidist import frameworks
from unidist.agreement import check_same
from unidist.batch import Share
from unidist.data import Feed, Source
from unidist.errors import FrameworkMismatchError, UnsupportedError
from unidist.nest import leaves, map_nest
from unidist.plans import BatchPlan, GlobalPlan, Plan
from unidist.streams import Generator, global_generators, in_step, repeatable

if TYPE_CHECKING:
    from unidist_torch.base import TorchBackend

_LOADER_SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "pin_memory_device", "in_order",
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
        return Source(length, lambda plan: LoaderFeed(data, plan, device, dict(options)), content=lambda: _content(data))
    if _is_nest(data):
        _refuse_options(options, "arrays")
        return Source(_rows(data), lambda plan: ArrayFeed(data, plan, device), content=lambda: _content(data))
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


def _content(data: Any) -> int | None:
    """A number for the first and last rows of arrays, which a data set of samples or of some indices may hold; reads no sample."""
    if isinstance(data, TensorDataset):
        return _content(data.tensors)
    if isinstance(data, Subset):
        return zlib.crc32(repr((list(map(int, data.indices)), _content(data.dataset))).encode())
    if isinstance(data, ConcatDataset):
        return zlib.crc32(repr([_content(part) for part in data.datasets]).encode())
    if isinstance(data, list):
        rows = leaves([*data[:1], *data[-1:]])
        return zlib.crc32(repr([_ends(row) for row in rows]).encode()) if all(map(_is_plain, rows)) else None
    return zlib.crc32(repr([_ends(leaf) for leaf in leaves(data)]).encode()) if _is_nest(data) else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bytes, numpy.ndarray, numpy.generic, torch.Tensor))


def _ends(leaf: Any) -> Any:
    """The first and last rows of an array or tensor as something that prints the same where they are the same."""
    if isinstance(leaf, numpy.ndarray):
        ends = [leaf[:1], leaf[-1:]] if leaf.ndim else [leaf]
        return repr([part.tolist() for part in ends]) if leaf.dtype.hasobject else zlib.crc32(b"".join(part.tobytes() for part in ends))
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    ends = torch.cat([leaf[:1].reshape(-1), leaf[-1:].reshape(-1)]) if leaf.ndim else leaf.reshape(-1)
    return zlib.crc32(ends.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())


def _loader_source(loader: DataLoader[Any], device: torch.device, options: Mapping[str, Any]) -> Source:
    """A user's DataLoader: its data set, settings and order stay; its batches are cut anew, those of an own batch sampler are kept."""
    settings = {name: getattr(loader, name) for name in _LOADER_SETTINGS if getattr(loader, name, None) is not None}
    if settings.get("collate_fn") is default_convert:  # what a loader with batch_size=None does to one sample
        del settings["collate_fn"]
    settings = {**settings, "persistent_workers": loader.num_workers > 0, **options}
    dataset, sampler, batches = loader.dataset, loader.sampler, loader.batch_sampler
    if isinstance(dataset, IterableDataset):
        return Source(None, lambda plan: StreamFeed(dataset, plan, device, settings), hint=_hint(loader), drop_last=loader.drop_last)
    if loader.batch_size is None and batches is not None:
        inner = batches if _splits(batches) else getattr(batches, "sampler", None)
        return Source(
            len(batches), lambda plan: LoaderFeed(dataset, plan, device, settings, batches), own_batches=True, shuffle=False,  # type: ignore[arg-type]
            split=_splits(inner), drawn=True,
        )  # fmt: skip
    length = len(sampler)  # type: ignore[arg-type]
    plain = type(sampler) in (SequentialSampler, RandomSampler) and not getattr(sampler, "replacement", False)
    drawn = not (plain and length == len(dataset))  # type: ignore[arg-type]
    return Source(
        length, lambda plan: LoaderFeed(dataset, plan, device, settings, sampler if drawn else None), hint=_hint(loader),
        shuffle=not drawn and isinstance(sampler, RandomSampler), drop_last=loader.drop_last, split=_splits(sampler), drawn=drawn,
        content=lambda: _content(dataset),
    )  # fmt: skip


def _hint(loader: DataLoader[Any]) -> str:
    if loader.batch_size is None:
        return "; with its batch_size=None the loader says nothing of it, give global_batch_size if its data set holds samples"
    return f"; the loader's batch_size={loader.batch_size} could mean either"


def _splits(sampler: Any) -> str:
    """The class of a sampler that deals out to ranks by itself, as DistributedSampler does and all that are made after it."""
    ranks = getattr(sampler, "num_replicas", 1)
    return type(sampler).__name__ if isinstance(ranks, int) and ranks > 1 and hasattr(sampler, "rank") else ""


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


def _generators() -> list[Generator]:
    """The process's random generators: Python's, NumPy's and torch's on the CPU."""
    own = torch.default_generator
    return [*global_generators(), Generator(own.get_state, own.set_state, own.manual_seed)]


def _drawn(sampler: Any, plan: Plan, epoch: int) -> list[Any]:
    """What a user's sampler gives for an epoch: the same on every rank, and again for the same seed.

    Raises MismatchError on all ranks where it has a random state of its own that differs, ValueError where its length is wrong.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(plan.seed + 7919 * epoch)
    (order,) = repeatable(lambda: iter([list(sampler)]), _generators(), plan.seed, epoch)
    if plan.control is not None and isinstance(plan, GlobalPlan):
        what = f"the order of {type(sampler).__name__} (a sampler with a random state of its own needs the same seed on every rank)"
        check_same(plan.control, what, [["its checksum", zlib.crc32(repr(order).encode())]])
    if len(order) != plan.num_samples:
        raise ValueError(f"{type(sampler).__name__} says that its length is {plan.num_samples}, but it gave {len(order)}")
    return order


class _Steps:
    """The batch sampler of one worker pool: the indices of the steps of an epoch, set before each iteration."""

    def __init__(self) -> None:
        self.pairs: Callable[[], Iterator[tuple[Share, list[int]]]] = lambda: iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return (indices for _, indices in self.pairs())


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
    """A map-style data set through one DataLoader for all epochs; its workers persist.

    sampler: the user's, of indices, or with a BatchPlan of batches of indices, each of them a global one.
    """

    def __init__(self, dataset: Any, plan: Plan, device: torch.device, settings: dict[str, Any], sampler: Any = None) -> None:
        refused = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & set(settings)
        if refused:
            raise TypeError(f"{sorted(refused)} are unidist's to set; use wrap_data's own arguments")
        if settings.get("num_workers", 0):
            settings.setdefault("persistent_workers", True)
        self._plan = plan
        self._sampler = sampler
        self._steps = _Steps()
        self._seeded = _Seeded(plan, settings)
        self._device = device
        self._loader = DataLoader(dataset, batch_sampler=self._steps, **settings)  # type: ignore[arg-type]

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        drawn = None if self._sampler is None else _drawn(self._sampler, self._plan, epoch)
        self._steps.pairs = lambda: self._pairs(epoch, start, drawn)
        self._seeded.begin(epoch, start)
        for (share, _), batch in zip(self._steps.pairs(), self._loader):
            yield share, to_device(batch, self._device)

    def _pairs(self, epoch: int, start: int, drawn: list[Any] | None) -> Iterator[tuple[Share, list[int]]]:
        if isinstance(self._plan, BatchPlan) and drawn is not None:
            for number, batch in enumerate(drawn[start:], start):
                share = self._plan.cut(len(batch), number == len(drawn) - 1)
                begin = sum(share.sizes[: share.first])
                yield share, list(batch[begin : begin + share.size] or batch[:1])
            return
        order = None if drawn is None else numpy.array(drawn, dtype=numpy.int64)
        for share, indices in self._plan.indices(epoch, start, order):
            yield share, indices.tolist()


class _Dealt(IterableDataset[Any]):
    """A stream's batches of this process; worker w of W makes those of steps w, w + W, ...

    The user's data set must not split by worker as well, so it does not see that it runs in one.
    """

    def __init__(self, stream: Any, plan: Plan, collate: Any) -> None:
        self.start, self.epoch = 0, 0
        self._stream = stream
        self._plan = plan
        self._collate = collate

    def __iter__(self) -> Iterator[tuple[Share, Any]]:
        worker = torch_worker._worker_info
        step, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        torch_worker._worker_info = None
        part = () if isinstance(self._plan, GlobalPlan) else (self._plan.first,)
        steps = repeatable(lambda: self._plan.batches(iter(self._stream)), _generators(), self._plan.seed, self.epoch, *part)
        try:
            for number, (share, items) in enumerate(steps):
                if number >= self.start and (number - self.start) % stride == step:
                    yield share, self._collate(items)
        finally:
            torch_worker._worker_info = worker


class StreamFeed:
    """A stream of samples: every process reads all of it and keeps its share, so no length is needed."""

    def __init__(self, stream: Any, plan: Plan, device: torch.device, settings: dict[str, Any]) -> None:
        collate = settings.pop("collate_fn", None) or default_collate
        self._control = plan.control if isinstance(plan, GlobalPlan) else None
        if settings.get("num_workers", 0):
            settings["persistent_workers"] = False  # a new epoch's start has to reach the workers
            if not isinstance(plan, GlobalPlan):
                raise UnsupportedError("a stream that is split already can't be read by worker processes; num_workers=0")
            plan = replace(plan, control=None)  # the workers' own copy, which may have to be pickled
        self._device = device
        self._seeded = _Seeded(plan, settings)
        self._dealt = _Dealt(stream, plan, collate)
        self._loader = DataLoader(self._dealt, batch_size=None, collate_fn=_unchanged, **settings)

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        self._dealt.start, self._dealt.epoch = start, epoch
        self._seeded.begin(epoch, start)
        for share, batch in in_step(self._control, iter(self._loader)):
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
