"""Plans: which samples of which step are this process's, worked out on every rank without an exchange."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidist.batch import Share, split_sizes
from unidist.errors import MismatchError
from unidist.streams import agreed


@dataclass(frozen=True)
class Plan(ABC):
    """How an epoch is cut: `num_samples` is what this process can reach (None: unknown until it was read).

    control: the control plane of several processes, for what can't be known without an exchange; None for one.
    """

    num_samples: int | None
    global_batch: int
    num_replicas: int
    first: int
    local: int
    shuffle: bool
    drop_last: bool
    seed: int
    control: Any = field(default=None, kw_only=True, compare=False, repr=False)

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

    @property
    def local_batch(self) -> int:
        """Samples that this process takes at most in a step."""
        return self.batch_of(self.first // self.local)

    @property
    def num_steps(self) -> int | None:
        if self.lengths is None:
            return None
        counts = [self._count(length, self.batch_of(process)) for process, length in enumerate(self.lengths)]
        return min(counts) if self.drop_last else max(counts, default=0)

    def share(self, step: int) -> Share:
        taken = [min(self.batch_of(p), max(n - step * self.batch_of(p), 0)) for p, n in enumerate(self.lengths or ())]
        return self._share(taken, step == (self.num_steps or 0) - 1)

    def positions(self, step: int) -> range:
        begin = step * self.local_batch
        return range(begin, begin + self.share(step).size)

    def batches(self, items: Iterator[Any]) -> Iterator[tuple[Share, list[Any]]]:
        """As for known lengths; the processes tell each other how much they have.

        Raises MismatchError on all ranks when one has no sample to take part with.
        """
        chunks = iter(lambda: list(itertools.islice(items, self.local_batch)), [])
        borrowed: list[Any] = []
        for sizes, following, chunk in agreed(self.control, chunks, len):
            if not borrowed and 0 in sizes:
                raise MismatchError(no_sample(sizes, "in their first step"))
            if self.drop_last and self._short(sizes):
                return
            borrowed = chunk[:1] if chunk else borrowed
            yield self._share(sizes, not following or (self.drop_last and self._short(following))), chunk or borrowed

    def _short(self, sizes: Sequence[int]) -> bool:
        return any(size < self.batch_of(process) for process, size in enumerate(sizes))

    def _share(self, taken: Sequence[int], last: bool) -> Share:
        sizes = [size for count in taken for size in split_sizes(count, self.local)]
        return Share(tuple(sizes), self.first, self.local, last)

    def batch_of(self, process: int) -> int:
        """Samples that a process takes at most in a step."""
        sizes = split_sizes(self.global_batch, self.num_replicas)
        return sum(sizes[process * self.local : (process + 1) * self.local])

    def _count(self, length: int, batch: int) -> int:
        if not batch:
            return 0
        return length // batch if self.drop_last else math.ceil(length / batch)


@dataclass(frozen=True)
class BatchPlan(GlobalPlan):
    """The data makes its own global batches: `num_samples` counts batches, and each is cut where it is read."""


def no_sample(lengths: Sequence[int], where: str) -> str:
    """The words for a process that can't take part, since not even a sample can be borrowed there."""
    empty = [rank for rank, length in enumerate(lengths) if not length]
    return (
        f"rank {', '.join(map(str, empty))} has no sample at all to take part with: the ranks have {list(lengths)} {where}; give every "
        "rank at least one, or give the whole data on every rank without already_sharded=True"
    )
