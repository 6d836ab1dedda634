"""When each action of a schedule runs, from how long a pass takes in each stage: its bubble, its activation memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unidist.pipeline.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule


@dataclass(frozen=True)
class Times:
    """Seconds (or any unit) by stage: of a forward pass, of the two halves of a backward pass; transfer: from a stage to the next."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    transfer: float = 0.0

    @classmethod
    def even(cls, num_stages: int, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0) -> Times:
        """Equal stages; both halves of a backward pass take as long."""
        return cls([forward] * num_stages, [backward / 2] * num_stages, [backward / 2] * num_stages, transfer)

    def of(self, action: Action) -> float:
        """How long it takes."""
        stage = action.stage
        if action.kind == FORWARD:
            return self.forward[stage]
        halves = {INPUT: (1, 0), WEIGHT: (0, 1), BACKWARD: (1, 1)}[action.kind]
        return halves[0] * self.backward_input[stage] + halves[1] * self.backward_weight[stage]


@dataclass(frozen=True)
class Span:
    """An action on its device, from start to end."""

    device: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A run of a schedule, predicted or measured."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they compute nothing, between 0 and 1."""
        busy = sum(span.end - span.start for span in self.spans)
        whole = self.length * self.schedule.num_devices
        return 1.0 - busy / whole if whole else 0.0

    def peak_activations(self) -> list[int]:
        """By device, how many micro-batches' activations of one stage it holds at most: from a forward pass to its backward pass."""
        last = WEIGHT if self.schedule.splits_backward else BACKWARD
        peaks = []
        for device in range(self.schedule.num_devices):
            held = peak = 0
            for span in sorted((s for s in self.spans if s.device == device), key=lambda s: s.start):
                held += (span.action.kind == FORWARD) - (span.action.kind == last)
                peak = max(peak, held + (span.action.kind == last))
            peaks.append(peak)
        return peaks


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Every action as soon as its device is free and what it needs has come. times: default 1 for a forward, 2 for a backward pass.

    Raises RuntimeError for orders that wait for each other.
    """
    times = Times.even(schedule.num_stages) if times is None else times
    done: dict[Action, float] = {}
    free = [0.0] * schedule.num_devices
    next_action = [0] * schedule.num_devices
    spans: list[Span] = []
    while len(spans) < sum(map(len, schedule.orders)):
        before = len(spans)
        for device, order in enumerate(schedule.orders):
            while next_action[device] < len(order):
                action = order[next_action[device]]
                arrived = [_arrival(need, action, done, times) for need in _needs(schedule, action)]
                if any(time is None for time in arrived):
                    break
                start = max([free[device], *(time for time in arrived if time is not None)])
                free[device] = done[action] = start + times.of(action)
                spans.append(Span(device, action, start, free[device]))
                next_action[device] += 1
        if len(spans) == before:
            raise RuntimeError(f"the orders of {schedule.name} wait for each other")
    return Timeline(schedule, tuple(spans))


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    backward = INPUT if schedule.splits_backward else BACKWARD
    if action.kind == FORWARD:
        return [Action(FORWARD, action.microbatch, action.stage - 1)] if action.stage else []
    if action.kind == WEIGHT:
        return [Action(INPUT, action.microbatch, action.stage)]
    needs = [Action(FORWARD, action.microbatch, action.stage)]
    if action.stage + 1 < schedule.num_stages:
        needs.append(Action(backward, action.microbatch, action.stage + 1))
    return needs


def _arrival(need: Action, action: Action, done: dict[Action, float], times: Times) -> float | None:
    """When what an action needs is on its device; None when it was not computed yet."""
    if need not in done:
        return None
    return done[need] + (times.transfer if need.stage != action.stage else 0.0)
