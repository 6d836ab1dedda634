"""Data, what `wrap_data` returns: a `Plan` says which samples of which step are this process's, the framework's `Feed` brings them."""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unidist.base import each_step
from unidist.batch import Share, split_sizes
from unidist.errors import MismatchError, UnsupportedError
from unidist.plans import BatchPlan, GlobalPlan, Plan, ShardedPlan, no_sample

if TYPE_CHECKING:
    from unidist.base import Backend


class Feed(Protocol):
    """A framework's loader: built once, iterated once per epoch."""

    def iterate(self, epoch: int, start: int) -> Iterator[tuple[Share, Any]]:
        """(share, batch) of every step of an epoch from step `start` on; an empty share comes with one borrowed sample."""


@dataclass(frozen=True)
class Source:
    """Data as a framework understands it.

    length: samples that this process can reach, or with `own_batches` batches; None when unknown. build: the feed for a plan.
    shuffle, drop_last: what the user's loader says about it, None when nothing. hint: why a size is still to be given.
    own_batches: the data makes the global batches itself, so that no size is given. split: what shows that it is split already.
    unordered: why each rank would see whole data in another order. content: a number that stands for the samples, the same on
    every rank that has the same; None where it can't be told without computing samples. drawn: the order is a sampler's.
    """

    length: int | None
    build: Callable[[Plan], Feed]
    shuffle: bool | None = None
    hint: str = ""
    drop_last: bool | None = None
    own_batches: bool = False
    split: str = ""
    unordered: str = ""
    content: Callable[[], int | None] = lambda: None
    drawn: bool = False


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
    if source.unordered and not already_sharded and backend.world.size > 1:
        raise ValueError(source.unordered)
    batch = check_size(source, backend.num_replicas, global_batch_size, per_replica_batch_size)
    plan = make_plan(
        backend, source, batch, already_sharded=already_sharded, drop_last=drop_last or bool(source.drop_last),
        shuffle=shuffle if source.shuffle is None else source.shuffle, seed=backend.settings.seed or 0,
    )  # fmt: skip
    wrapped = Data(backend, plan, source.build(plan), drawn=source.drawn)
    if backend.world.rank == 0 and os.environ.get("UNIDIST_TRAIN_QUIET") != "1":
        print(describe(plan), file=sys.stderr, flush=True)
    if plan.num_steps == 0:
        warnings.warn(_no_steps(plan), stacklevel=4)
    return wrapped


def make_plan(backend: Backend, source: Source, batch: int, *, already_sharded: bool, shuffle: bool, drop_last: bool, seed: int) -> Plan:
    """The plan for this data; every rank must call it.

    Raises ValueError for shuffled streams and parts without a place in the batch, MismatchError when whole data differs between ranks or
    a part is empty.
    """
    length, several = source.length, backend.world.size > 1
    if shuffle and length is None:
        raise ValueError("shuffle=True needs data of known length; shuffle a stream before it is given to wrap_data")
    if already_sharded and source.own_batches and several:
        raise UnsupportedError("data that makes its own batches must be whole on every rank; unidist takes each rank's share of them")
    common: dict[str, Any] = {
        "num_samples": length, "global_batch": batch, "num_replicas": backend.num_replicas, "local": backend.local_replicas,
        "first": backend.world.rank * backend.local_replicas, "shuffle": shuffle, "drop_last": drop_last, "seed": seed,
        "control": backend.control if several else None,
    }  # fmt: skip
    whole = BatchPlan if source.own_batches else GlobalPlan
    if not several:
        return whole(**common)
    content = source.content() if backend.settings.check and not already_sharded else None
    mine = json.dumps([length, content, batch, already_sharded, shuffle, drop_last, seed])
    known = [json.loads(row) for row in backend.control.gather("wrap_data", mine)]
    lengths, contents = [row[0] for row in known], [row[1] for row in known]
    _check_same(known)
    if not already_sharded:
        _check_whole(lengths, contents)
        return whole(**common)
    plan = ShardedPlan(**common, lengths=None if None in lengths else tuple(lengths))
    if not all(plan.batch_of(process) for process in range(backend.world.size)):
        raise ValueError(
            f"a global batch of {batch} has no place for some of {backend.world.size} processes that hold different data; give "
            "per_replica_batch_size, or a global batch of at least one sample for each"
        )
    if plan.lengths is not None and 0 in lengths and any(lengths):
        raise MismatchError(no_sample(lengths, "in all"))
    return plan


def _check_whole(lengths: list[Any], contents: list[Any]) -> None:
    if len(set(lengths)) > 1:
        raise MismatchError(
            f"wrap_data got {lengths} samples on ranks 0 to {len(lengths) - 1}; every rank must give the whole data, or say "
            "already_sharded=True"
        )
    odd = [rank for rank, content in enumerate(contents) if content != contents[0]]
    if odd:
        raise MismatchError(
            f"the samples given to wrap_data differ: those of rank {', '.join(map(str, odd))} are not those of rank 0. Every rank must "
            "give the same whole data, in one order; give data that is split already with already_sharded=True and per_replica_batch_size"
        )


def _no_steps(plan: Plan) -> str:
    lengths = plan.lengths if isinstance(plan, ShardedPlan) else None
    what = f"{sum(lengths)} samples ({list(lengths)} by rank)" if lengths else f"{plan.num_samples} samples"
    why = f" in global batches of {plan.global_batch} with drop_last=True" if plan.drop_last else ""
    return f"this data has no step at all: {what}{why}"


def _check_same(known: list[list[Any]]) -> None:
    for position, what in enumerate(("batch size", "already_sharded", "shuffle", "drop_last", "seed"), start=2):
        values = [row[position] for row in known]
        if len(set(values)) > 1:
            raise MismatchError(f"wrap_data got a different {what} on each rank: {values}")


class Data:
    """The batches of this process, on its device; every iteration is one epoch, and epochs advance by themselves.

    `share` is that of the batch drawn last: pass it to `backward`, `step`'s relatives or `Mean.update` when several loaders
    are used at once. A batch keeps the type that the data set yields.
    """

    def __init__(self, backend: Backend, plan: Plan, feed: Feed, *, drawn: bool = False) -> None:
        self.plan = plan
        self.share: Share | None = None
        self._backend = backend
        self._feed = feed
        self._seeded = plan.shuffle or drawn
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
        if self._step == start == 0 and self.plan.num_steps is None and self._epoch == epoch:
            warnings.warn("a pass over this data had no step at all: it gave no sample", stacklevel=3)
        self._epoch, self._step = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch's order."""
        self._epoch, self._start, self._step = int(epoch), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands: after `load_state_dict`, the next iteration begins with the very next batch."""
        plan, samples, parts = self.plan, self.plan.num_samples, 1
        if isinstance(plan, ShardedPlan):
            samples, parts = None if plan.lengths is None else sum(plan.lengths), plan.num_replicas // plan.local
        return {"epoch": self._epoch, "step": self._step, "seed": plan.seed, "global_batch": plan.global_batch,
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
        if state["seed"] != plan.seed and self._seeded:
            raise ValueError(f"the state is of seed {state['seed']}, this data of seed {plan.seed}: the order differs")
        mine = self.state_dict()
        known = {**mine, **state}  # a state without these facts is of this data
        for name, what in (("num_samples", "samples"), ("parts", "parts among ranks")):
            if step and known[name] != mine[name]:
                raise ValueError(f"the state is of the middle of an epoch of data with {known[name]} {what}, this data has {mine[name]}")
        there, here = int(known["global_batch"]), plan.global_batch
        begun, rest = divmod(step * there, here)
        if rest:
            raise ValueError(
                f"the state is after {step} global batches of {there}, which is no whole number of batches of {here}: give "
                f"global_batch_size={there}, or go on from the next epoch with set_epoch({int(state['epoch']) + 1})"
            )
        return int(state["epoch"]), begun


class Accumulated:
    """A window of batches for one update in an own loop: iterate over it, then step the optimizer once."""

    def __init__(self, batches: list[tuple[Share | None, Any]], backend: Backend, data: Data | None) -> None:
        self._batches = batches
        self._backend = backend
        self._data = data

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        processes = self._backend.world.size
        sizes = [(share.size, share.total) if share is not None else (1, processes) for share, _ in self._batches]
        window = sum(total for _, total in sizes)
        for position, ((share, batch), (size, _)) in enumerate(zip(self._batches, sizes), start=1):
            self._backend.shares.draw(share, size * processes / window, position == len(sizes), position == 1)
            if self._data is not None:
                self._data.share = share
            yield batch


def windows(backend: Backend, data: Iterable[Any], k: int) -> Iterator[Accumulated]:
    """Windows of k batches of one pass over `data`; the last may hold fewer."""
    wrapped = data if isinstance(data, Data) else None
    pairs = wrapped._epoch_pairs() if wrapped is not None else ((None, batch) for batch in data)
    while chunk := list(itertools.islice(pairs, k)):
        yield Accumulated(chunk, backend, wrapped)
    if wrapped is not None:
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
