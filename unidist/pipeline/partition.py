"""Where a chain of layers is cut, so that the slowest device is as fast as it can be and every stage fits its device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.errors import UnsupportedError


@dataclass(frozen=True)
class Layers:
    """What is known of each layer, in order: its name, its cost (seconds, parameters or bytes) and the bytes that it holds while training.

    crossing: cost of a cut behind each layer, of what has to be sent on there; the last one is never paid.
    """

    names: Sequence[str]
    costs: Sequence[float]
    memory: Sequence[float] = ()
    crossing: Sequence[float] = ()

    def __post_init__(self) -> None:
        for what in ("costs", "memory", "crossing"):
            given = getattr(self, what)
            if len(given) not in (len(self.names), 0 if what != "costs" else -1):
                raise ValueError(f"{what} has {len(given)} numbers for {len(self.names)} layers")


@dataclass(frozen=True)
class Devices:
    """Of each device, in the order of the stages: its speed (cost a second, relative) and the bytes that it has."""

    speeds: Sequence[float]
    limits: Sequence[float] = ()

    @classmethod
    def equal(cls, number: int) -> Devices:
        """Of one speed, without limits."""
        return cls([1.0] * number)


@dataclass(frozen=True)
class Cut:
    """boundaries: the first layer of every stage but the first; costs: of each stage on its device, what crosses its cuts included."""

    boundaries: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """The cost of the slowest stage."""
        return max(self.costs)

    def stages(self, num_layers: int) -> list[range]:
        """The layers of each stage."""
        edges = [0, *self.boundaries, num_layers]
        return [range(begin, end) for begin, end in itertools.pairwise(edges)]


def best_cut(layers: Layers, devices: Devices) -> Cut:
    """The cut into consecutive, non-empty stages whose slowest is fastest; among equals the one whose other stages are faster, too.

    Dynamic programming over (layers so far, stages so far). Raises ValueError for fewer layers than devices, UnsupportedError, with the
    numbers, when no cut fits the devices' memory.
    """
    n, parts = len(layers.names), len(devices.speeds)
    if n < parts:
        raise ValueError(f"a model of {n} layers can't be cut into {parts} stages: {', '.join(layers.names)}")
    sums = _Sums(layers, devices)
    # best[end]: (sorted costs from the slowest on, boundaries) of the first `end` layers on the stages so far
    best: list[tuple[tuple[float, ...], tuple[int, ...]] | None] = [((), ()) if end == 0 else None for end in range(n + 1)]
    for stage in range(parts):
        following: list[tuple[tuple[float, ...], tuple[int, ...]] | None] = [None] * (n + 1)
        for end in range(stage + 1, n - (parts - stage - 1) + 1):
            for begin in range(stage, end):
                before = best[begin]
                if before is None or not sums.fits(stage, begin, end):
                    continue
                costs = tuple(sorted((*before[0], sums.cost(stage, begin, end)), reverse=True))
                found = following[end]
                if found is None or costs < found[0]:
                    following[end] = (costs, (*before[1], begin))
        best = following
    if best[n] is None:
        raise UnsupportedError(_does_not_fit(layers, devices))
    return checked_cut(layers, devices, best[n][1][1:])  # type: ignore[index]


def checked_cut(layers: Layers, devices: Devices, boundaries: Sequence[int]) -> Cut:
    """The cut at boundaries that were given.

    Raises ValueError where they are not increasing numbers of layers, one fewer than devices; UnsupportedError where a stage does not fit.
    """
    n, parts = len(layers.names), len(devices.speeds)
    edges = [0, *boundaries, n]
    if len(boundaries) != parts - 1 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(
            f"boundaries are {parts - 1} increasing numbers from 1 to {n - 1}, the first layer of each later stage, not {boundaries}"
        )
    sums = _Sums(layers, devices)
    for stage, (begin, end) in enumerate(itertools.pairwise(edges)):
        if not sums.fits(stage, begin, end):
            raise UnsupportedError(
                f"stage {stage} (layers {layers.names[begin]} to {layers.names[end - 1]}) needs {sums.memory(begin, end):,.0f} bytes while "
                f"training, its device has {devices.limits[stage]:,.0f}"
            )
    return Cut(tuple(boundaries), tuple(sums.cost(stage, begin, end) for stage, (begin, end) in enumerate(itertools.pairwise(edges))))


class _Sums:
    """Sums over consecutive layers, from running totals."""

    def __init__(self, layers: Layers, devices: Devices) -> None:
        self._costs = [0.0, *itertools.accumulate(layers.costs)]
        self._memory = [0.0, *itertools.accumulate(layers.memory)] if layers.memory else None
        self._crossing = layers.crossing
        self._devices = devices
        self._n = len(layers.names)

    def cost(self, stage: int, begin: int, end: int) -> float:
        computing = (self._costs[end] - self._costs[begin]) / self._devices.speeds[stage]
        if not self._crossing:
            return computing
        received = self._crossing[begin - 1] if begin else 0.0
        sent = self._crossing[end - 1] if end < self._n else 0.0
        return computing + received + sent

    def memory(self, begin: int, end: int) -> float:
        return self._memory[end] - self._memory[begin] if self._memory is not None else 0.0

    def fits(self, stage: int, begin: int, end: int) -> bool:
        limits = self._devices.limits
        return not limits or self.memory(begin, end) <= limits[stage]


def _does_not_fit(layers: Layers, devices: Devices) -> str:
    largest = max(range(len(layers.names)), key=lambda i: layers.memory[i])
    have = ", ".join(f"{limit:,.0f}" for limit in devices.limits)
    return (
        f"no cut of the {len(layers.names)} layers fits {len(devices.speeds)} devices: the layers need {math.fsum(layers.memory):,.0f} "
        f"bytes while training, the largest ({layers.names[largest]}) {layers.memory[largest]:,.0f}; the devices have {have}"
    )
