"""Data, what `wrap_data` returns: each process's share of every global batch, planned without an exchange.

A `Plan` says which samples of which step are this process's; the framework's `Feed` brings them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unidist.base import each_step
from unidist.batch import Share, split_sizes
from unidist.errors import MismatchError, UnsupportedError

if TYPE_CHECKING:
    from unidist.base import Backend

AGREE_EVERY = 32


class Feed(Protocol):
    """A framework's loader: built once, iterated once per epoch."""

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        """(share, batch) of every step of an epoch from step `start` on; an empty share comes with one borrowed sample."""


@dataclass(frozen=True)
class Source:
    """Data as a framework understands it.

    length: samples that this process can reach, or with `own_batches` batches; None when unknown. build: the feed for a plan.
    shuffle: what the user's loader says about it, None when it says nothing. hint: why a size is still to be given.
    own_batches: the data makes the global batches itself, so that no size is given. split: what shows that it is split already.
    """

    length: int | None
    build: Callable[[Plan], Feed]
    shuffle: bool | None = None
    hint: str = ""
    own_batches: bool = False
    split: str = ""


@dataclass(frozen=True)
class Plan(ABC):
    """How an epoch is cut: `num_samples` is what this process can reach (None: unknown until it was read)."""

    num_samples: int | None
    global_batch: int
    num_replicas: int
    first: int
    local: int
    shuffle: bool
    drop_last: bool
    seed: int

    @property
    @abstractmethod
    def num_steps(self) -> int | None:
        """Steps of an epoch, the same on every rank; None when the length is unknown."""

    @abstractmethod
    def share(self, step: int) -> Share:
        """What each replica has of a step, where the length is known."""

    @abstractmethod
    def positions(self, step: int) -> range:
        """This process's places of a step in the epoch's order."""

    @abstractmethod
    def batches(self, items: Iterator[Any]) -> Iterator[tuple[Share, list[Any]]]:
        """Shares and items of this process from a stream of items of unknown length."""

    def order(self, epoch: int) -> Any:
        """The samples of an epoch in the order in which they are dealt out (int64 array of indices).

        The same for the same seed and epoch, on every rank and in both frameworks.
        """
        import numpy

        count = self.num_samples or 0
        return numpy.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle else numpy.arange(count)

    def indices(self, epoch: int, start: int, order: Any = None) -> Iterator[tuple[Share, Any]]:
        """(share, indices of this process's samples) of every step from `start` on; an empty share borrows one index.

        order: int64 array of indices in place of the plan's own.
        """
        order = self.order(epoch) if order is None else order
        for step in range(start, self.num_steps or 0):
            mine = self.positions(step)
            chosen = order[mine.start : mine.stop]
            yield self.share(step), chosen if len(chosen) else order[:1]


@dataclass(frozen=True)
class GlobalPlan(Plan):
    """Every process can reach all samples: each global batch is cut into consecutive shares."""

    @property
    def num_steps(self) -> int | None:
        if self.num_samples is None:
            return None
        return self.num_samples // self.global_batch if self.drop_last else math.ceil(self.num_samples / self.global_batch)

    def share(self, step: int) -> Share:
        steps = self.num_steps or 0
        total = min(self.global_batch, (self.num_samples or 0) - step * self.global_batch)
        return self._share(total, step == steps - 1)

    def positions(self, step: int) -> range:
        share = self.share(step)
        begin = step * self.global_batch + sum(share.sizes[: self.first])
        return range(begin, begin + share.size)

    def batches(self, items: Iterator[Any]) -> Iterator[tuple[Share, list[Any]]]:
        chunk = list(itertools.islice(items, self.global_batch))
        while chunk and not (self.drop_last and len(chunk) < self.global_batch):
            following = list(itertools.islice(items, self.global_batch))
            ends = not following or (self.drop_last and len(following) < self.global_batch)
            share = self._share(len(chunk), ends)
            begin = sum(share.sizes[: self.first])
            yield share, chunk[begin : begin + share.size] or chunk[:1]
            chunk = following

    def cut(self, total: int, last: bool) -> Share:
        """The shares of a batch of `total` samples."""
        return self._share(total, last)

    def _share(self, total: int, last: bool) -> Share:
        return Share(split_sizes(total, self.num_replicas), self.first, self.local, last)


@dataclass(frozen=True)
class ShardedPlan(Plan):
    """The data is split already: `num_samples` is this process's, `lengths` every process's (None: unknown)."""

    lengths: tuple[int, ...] | None = None
    control: Any = None

    @property
    def local_batch(self) -> int:
        """Samples that this process takes at most in a step."""
        return self._batch(self.first // self.local)

    @property
    def num_steps(self) -> int | None:
        if self.lengths is None:
            return None
        counts = [self._count(length, self._batch(process)) for process, length in enumerate(self.lengths)]
        return min(counts) if self.drop_last else max(counts, default=0)

    def share(self, step: int) -> Share:
        taken = [min(self._batch(p), max(n - step * self._batch(p), 0)) for p, n in enumerate(self.lengths or ())]
        return self._share(taken, step == (self.num_steps or 0) - 1)

    def positions(self, step: int) -> range:
        begin = step * self.local_batch
        return range(begin, begin + self.share(step).size)

    def batches(self, items: Iterator[Any]) -> Iterator[tuple[Share, list[Any]]]:
        """As for known lengths; the processes tell each other how much they have once per 32 steps."""
        chunks = iter(lambda: list(itertools.islice(items, self.local_batch)), [])
        borrowed: list[Any] = []
        while True:
            ahead = list(itertools.islice(chunks, AGREE_EVERY))
            rows = self.control.gather("wrap_data", json.dumps([len(chunk) for chunk in ahead]))
            sizes = [json.loads(row) for row in rows]
            steps = max(len(row) for row in sizes)
            for step in range(steps):
                taken = [row[step] if step < len(row) else 0 for row in sizes]
                chunk = ahead[step] if step < len(ahead) else []
                borrowed = chunk[:1] or borrowed
                if not borrowed:
                    raise MismatchError(f"this process has no sample at all to take part with; samples by process: {taken}")
                if self.drop_last and any(size < self._batch(p) for p, size in enumerate(taken)):
                    return
                yield self._share(taken, step == steps - 1 and steps < AGREE_EVERY), chunk or borrowed
            if steps < AGREE_EVERY:
                return

    def _share(self, taken: Sequence[int], last: bool) -> Share:
        sizes = [size for count in taken for size in split_sizes(count, self.local)]
        return Share(tuple(sizes), self.first, self.local, last)

    def _batch(self, process: int) -> int:
        sizes = split_sizes(self.global_batch, self.num_replicas)
        return sum(sizes[process * self.local : (process + 1) * self.local])

    def _count(self, length: int, batch: int) -> int:
        if not batch:
            return 0
        return length // batch if self.drop_last else math.ceil(length / batch)


@dataclass(frozen=True)
class BatchPlan(GlobalPlan):
    """The data makes its own global batches: `num_samples` counts batches, and each is cut where it is read."""


def check_size(source: Source, num_replicas: int, whole: int | None, each: int | None) -> int:
    """The global batch size from the one size that was given.

    Raises ValueError when none or both were, when it isn't a positive whole number, or for data that makes its own batches.
    """
    given = [size for size in (whole, each) if size is not None]
    if source.own_batches:
        if given:
            raise ValueError("this data makes its own batches, each of them a global batch; give no batch size to wrap_data")
        return 1
    if len(given) != 1:
        what = "both were given" if given else f"none was{source.hint}"
        raise ValueError(
            f"wrap_data needs exactly one of global_batch_size (what one device would take) and per_replica_batch_size; {what}"
        )
    if isinstance(given[0], bool) or not hasattr(given[0], "__index__") or given[0] < 1:
        raise ValueError(f"a batch size is a whole number of at least 1, not {given[0]!r}")
    size = given[0].__index__()
    return size if whole is not None else size * num_replicas


def make_data(
    backend: Backend, data: Any, *, global_batch_size: int | None, per_replica_batch_size: int | None,
    already_sharded: bool, shuffle: bool, drop_last: bool, options: Mapping[str, Any],
) -> Data:  # fmt: skip
    """What `wrap_data` does; the line about it is printed on rank 0."""
    source = backend._source(data, shuffle=shuffle, options=options)
    if source.split and not already_sharded and backend.num_replicas > 1:
        raise ValueError(f"this data is split by {source.split} already; give the whole data, or say already_sharded=True")
    batch = check_size(source, backend.num_replicas, global_batch_size, per_replica_batch_size)
    plan = make_plan(
        backend, source, batch, already_sharded=already_sharded, drop_last=drop_last,
        shuffle=shuffle if source.shuffle is None else source.shuffle, seed=backend.settings.seed or 0,
    )  # fmt: skip
    wrapped = Data(backend, plan, source.build(plan))
    if backend.world.rank == 0 and os.environ.get("UNIDIST_TRAIN_QUIET") != "1":
        print(describe(plan), file=sys.stderr, flush=True)
    return wrapped


def make_plan(backend: Backend, source: Source, batch: int, *, already_sharded: bool, shuffle: bool, drop_last: bool, seed: int) -> Plan:
    """The plan for this data; every rank must call it.

    Raises ValueError for shuffled streams, MismatchError when whole data has different lengths on the ranks.
    """
    length = source.length
    if shuffle and length is None:
        raise ValueError("shuffle=True needs data of known length; shuffle a stream before it is given to wrap_data")
    common = {
        "num_samples": length, "global_batch": batch, "num_replicas": backend.num_replicas, "local": backend.local_replicas,
        "first": backend.world.rank * backend.local_replicas, "shuffle": shuffle, "drop_last": drop_last, "seed": seed,
    }  # fmt: skip
    whole = BatchPlan if source.own_batches else GlobalPlan
    if already_sharded and source.own_batches and backend.world.size > 1:
        raise UnsupportedError("data that makes its own batches must be whole on every rank; unidist takes each rank's share of them")
    if backend.world.size == 1:
        return whole(**common)  # type: ignore[arg-type]
    known = [
        json.loads(row)
        for row in backend.control.gather("wrap_data", json.dumps([length, batch, already_sharded, shuffle, drop_last, seed]))
    ]
    _check_same(known)
    if not already_sharded:
        if len({row[0] for row in known}) > 1:
            raise MismatchError(
                f"wrap_data got {[row[0] for row in known]} samples on ranks 0 to {len(known) - 1}; every rank must give the "
                "whole data, or say already_sharded=True"
            )
        return whole(**common)  # type: ignore[arg-type]
    lengths = None if any(row[0] is None for row in known) else tuple(row[0] for row in known)
    if lengths is not None and 0 in lengths and any(lengths):
        raise MismatchError(f"a rank has no sample at all to take part with; samples by rank: {list(lengths)}")
    return ShardedPlan(**common, lengths=lengths, control=backend.control)  # type: ignore[arg-type]


def _check_same(known: list[list[Any]]) -> None:
    for position, what in enumerate(("batch size", "already_sharded", "shuffle", "drop_last", "seed"), start=1):
        values = [row[position] for row in known]
        if len(set(values)) > 1:
            raise MismatchError(f"wrap_data got a different {what} on each rank: {values}")


class Data:
    """The batches of this process, on its device; every iteration is one epoch, and epochs advance by themselves.

    `share` is that of the batch drawn last: pass it to `backward`, `step`'s relatives or `Mean.update` when several loaders
    are used at once. A batch keeps the type that the data set yields.
    """

    def __init__(self, backend: Backend, plan: Plan, feed: Feed) -> None:
        self.plan = plan
        self.share: Share | None = None
        self._backend = backend
        self._feed = feed
        self._epoch = 0
        self._start = 0
        self._step = 0

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank. Raises TypeError for data of unknown length."""
        steps = self.plan.num_steps
        if steps is None:
            raise TypeError("this data has no known length")
        return steps

    def __iter__(self) -> Iterator[Any]:
        return each_step(self._epoch_pairs(), self._backend)

    def _epoch_pairs(self) -> Iterator[tuple[Share, Any]]:
        epoch, start = self._epoch, self._start
        self._start, self._step = 0, start
        for share, batch in self._feed.iterate(epoch, start):
            self._step += 1
            self.share = share
            if share.last:
                self._epoch, self._step = epoch + 1, 0
            yield share, batch
        self._epoch, self._step = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch's order."""
        self._epoch, self._start, self._step = int(epoch), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands: after `load_state_dict`, the next iteration begins with the very next batch."""
        plan, samples, parts = self.plan, self.plan.num_samples, 1
        if isinstance(plan, ShardedPlan):
            samples, parts = None if plan.lengths is None else sum(plan.lengths), plan.num_replicas // plan.local
        return {"epoch": self._epoch, "step": self._step, "seed": plan.seed, "global_batch_size": plan.global_batch,
                "num_samples": samples, "parts": parts}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken. The position counts in samples, so that another number of workers, or another global batch
        size that divides what was read, goes on at the very next sample.

        Raises ValueError when the order there had another seed, or in the middle of an epoch: when the data has another length, when the
        position is not between two batches of this size, when data that was split already was split otherwise.
        """
        self._epoch, self._start = self._located(state)
        self._step = self._start

    def _located(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """(epoch, step) of a state; nothing is changed."""
        plan, step = self.plan, int(state["step"])
        if state["seed"] != plan.seed and plan.shuffle:
            raise ValueError(f"the state is of seed {state['seed']}, this data of seed {plan.seed}: the order differs")
        mine = self.state_dict()
        known = {**mine, **state}  # a state without these facts is of this data
        for name, what in (("num_samples", "samples"), ("parts", "parts among ranks")):
            if step and known[name] != mine[name]:
                raise ValueError(f"the state is of the middle of an epoch of data with {known[name]} {what}, this data has {mine[name]}")
        samples = step * known["global_batch_size"]
        if samples % plan.global_batch:
            raise ValueError(
                f"the state is after {samples} samples of its epoch ({step} batches of {known['global_batch_size']}), which is not between "
                f"two batches of {plan.global_batch}; give wrap_data the global batch size {known['global_batch_size']}"
            )
        return int(state["epoch"]), samples // plan.global_batch


class Accumulated:
    """A window of batches for one update in an own loop: iterate over it, then step the optimizer once."""

    def __init__(self, batches: list[tuple[Share | None, Any]], backend: Backend) -> None:
        self._batches = batches
        self._backend = backend

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        processes = self._backend.world.size
        sizes = [(share.size, share.total) if share is not None else (1, processes) for share, _ in self._batches]
        window = sum(total for _, total in sizes)
        for position, ((share, batch), (size, _)) in enumerate(zip(self._batches, sizes), start=1):
            self._backend.shares.draw(share, size * processes / window, position == len(sizes))
            yield batch


def windows(backend: Backend, data: Iterable[Any], k: int) -> Iterator[Accumulated]:
    """Windows of k batches of one pass over `data`; the last may hold fewer."""
    pairs = data._epoch_pairs() if isinstance(data, Data) else ((None, batch) for batch in data)
    while chunk := list(itertools.islice(pairs, k)):
        yield Accumulated(chunk, backend)
    if isinstance(data, Data):
        backend._end_of_pass()


def describe(plan: Plan) -> str:
    """The line that rank 0 prints when data is wrapped."""
    if isinstance(plan, BatchPlan):
        return f"data | {plan.num_samples} global batches an epoch, made by the data, over {plan.num_replicas} replicas"
    text = f"data | global batch {plan.global_batch} = {_sum(split_sizes(plan.global_batch, plan.num_replicas))}"
    if plan.num_steps is None:
        return f"{text} | length unknown"
    total = sum(plan.lengths) if isinstance(plan, ShardedPlan) and plan.lengths else plan.num_samples or 0
    text += f" | {plan.num_steps} steps an epoch ({total:,} samples)"
    last = plan.share(plan.num_steps - 1) if plan.num_steps else None
    return text if last is None or last.total == plan.global_batch else f"{text} | last batch {last.total} = {_sum(last.sizes)}"


def _sum(sizes: Iterable[int]) -> str:
    sizes = list(sizes)
    if len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return "+".join(map(str, sizes)) if len(sizes) <= 8 else "+".join(map(str, sizes[:8])) + "+..."
