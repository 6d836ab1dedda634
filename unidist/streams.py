"""Streams, data of unknown length: processes that read them keep in step, and what is random in them is the same on every rank."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from unidist.errors import MismatchError

AGREE_EVERY = 32
_END = object()

T = TypeVar("T")


class Step(NamedTuple):
    """One step of a stream: how much every process has of it and of the next one (empty when none follows); this process's part, if any."""

    sizes: list[int]
    following: list[int]
    mine: Any


def agreed(control: Any, parts: Iterator[T], size_of: Callable[[T], int]) -> Iterator[Step]:
    """The steps of a stream that several processes read, the same number on each.

    parts: what this process has, step by step. They tell each other their sizes once per 32 steps, more often at the start, so that the
    first step waits for two parts only; each reads on while it yields.
    """
    ahead: deque[T] = deque()
    every = 1
    while True:
        ahead.extend(itertools.islice(parts, every + 1 - len(ahead)))
        rows = [json.loads(row) for row in control.gather("wrap_data", json.dumps([size_of(part) for part in ahead]))]
        steps = [list(sizes) for sizes in itertools.zip_longest(*rows, fillvalue=0)]
        for number, sizes in enumerate(steps[:every]):
            mine = ahead.popleft() if ahead else None
            yield Step(sizes, steps[number + 1] if number + 1 < len(steps) else [], mine)
            if len(steps) > every:
                ahead.extend(itertools.islice(parts, 1))
        if len(steps) <= every:
            return
        every = min(2 * every, AGREE_EVERY)


def in_step(control: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """The (share, batch) pairs of a stream that every process reads whole; `control`: None for one process.

    Raises MismatchError on all ranks where their streams differ in length, before the step that only some would take.
    """
    if control is None or control.size == 1:
        yield from pairs
        return
    totals = [0] * control.size
    for sizes, _, pair in agreed(control, pairs, lambda pair: int(pair[0].total)):
        totals = [total + size for total, size in zip(totals, sizes)]
        if len(set(sizes)) > 1:
            raise MismatchError(
                f"the stream given to wrap_data differs between ranks: {totals} samples on ranks 0 to {len(totals) - 1} so far, where some "
                "of them have no more; every rank must give the whole stream, or say already_sharded=True"
            )
        yield pair


class Generator(NamedTuple):
    """One of a process's global random generators: how its state is taken, put back, and seeded."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    seed: Callable[[int], Any]


def global_generators() -> list[Generator]:
    """Python's and NumPy's."""
    import numpy

    return [
        Generator(random.getstate, random.setstate, random.seed),
        Generator(lambda: numpy.random.get_state(legacy=False), numpy.random.set_state, numpy.random.seed),
    ]


def repeatable(start: Callable[[], Iterator[T]], generators: Sequence[Generator], *seeds: int) -> Iterator[T]:
    """What the iterator of `start` yields, which draws from global generators that are seeded for it alone.

    So a stream that shuffles itself has one order on every rank and in every loader worker, again for the same seeds, and the
    process's own random numbers go on as if it had drawn none.
    """
    items: Iterator[T] | None = None
    inside: list[Any] = []
    while True:
        outside = [generator.get() for generator in generators]
        try:
            if items is None:
                for generator in generators:
                    generator.seed(zlib.crc32(repr(seeds).encode()))
                items = start()
            else:
                for generator, state in zip(generators, inside):
                    generator.put(state)
            item: Any = next(items, _END)
            inside = [generator.get() for generator in generators]
        finally:
            for generator, state in zip(generators, outside):
                generator.put(state)
        if item is _END:
            return
        yield item
