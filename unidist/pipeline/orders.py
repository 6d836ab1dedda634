"""In which order each device of a pipeline computes: the schedules, as lists of actions.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021a), interleaved 1F1B (Megatron-LM, Narayanan et al. 2021b),
zero bubble (ZB-H1, Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unidist.errors import UnsupportedError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # INPUT and WEIGHT: the two halves of a backward pass


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage; kind: FORWARD, BACKWARD, or its halves INPUT and WEIGHT."""

    kind: str
    microbatch: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """orders: for each device its actions, first to last. A device holds `num_chunks` stages: device, device + num_devices, ..."""

    name: str
    num_devices: int
    num_microbatches: int
    num_chunks: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages that a micro-batch goes through."""
        return self.num_devices * self.num_chunks

    def device_of(self, stage: int) -> int:
        """The device that holds a stage."""
        return stage % self.num_devices

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass comes in two halves."""
        return any(action.kind == INPUT for action in self.orders[0])


Order = Callable[[int, int, int, int], list[Action]]


def _gpipe(device: int, devices: int, microbatches: int, chunks: int) -> list[Action]:
    """All forward passes, then all backward passes."""
    return [Action(kind, m, device) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]


def _one_f_one_b(device: int, devices: int, microbatches: int, chunks: int) -> list[Action]:
    """As many forward passes as there are devices behind, then one forward and one backward in turn, then what is left."""
    return _in_turn(
        [Action(FORWARD, m, device) for m in range(microbatches)],
        [Action(BACKWARD, m, device) for m in range(microbatches)],
        devices - device - 1,
    )


def _interleaved(device: int, devices: int, microbatches: int, chunks: int) -> list[Action]:
    """Groups of as many micro-batches as devices go through a chunk each, in 1F1B over all of them."""
    if microbatches % devices:
        raise UnsupportedError(
            f"the interleaved schedule needs a multiple of {devices} micro-batches on {devices} devices, not {microbatches}; use 1f1b"
        )
    count = microbatches * chunks

    def place(k: int, backward: bool) -> tuple[int, int]:
        chunk = k // devices % chunks
        chunk = chunks - 1 - chunk if backward else chunk
        return k // (devices * chunks) * devices + k % devices, chunk * devices + device

    forward = [Action(FORWARD, *place(k, False)) for k in range(count)]
    backward = [Action(BACKWARD, *place(k, True)) for k in range(count)]
    return _in_turn(forward, backward, (devices - device - 1) * 2 + (chunks - 1) * devices)


def _in_turn(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for f, b in zip(forward[ahead:], backward):
        order += [f, b]
    return order + backward[len(forward) - ahead :]


def _zero_bubble(device: int, devices: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B whose gradients of weights wait: those of the first device go out at once, device d holds back up to d of them."""
    order: list[Action] = []
    held: list[Action] = []
    for action in _one_f_one_b(device, devices, microbatches, chunks):
        if action.kind == FORWARD:
            order.append(action)
            continue
        order.append(Action(INPUT, action.microbatch, action.stage))
        held.append(Action(WEIGHT, action.microbatch, action.stage))
        if len(held) > device:
            order.append(held.pop(0))
    return order + held


ORDERS: dict[str, Order] = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "interleaved": _interleaved, "zero_bubble": _zero_bubble}


def make_schedule(name: str, num_devices: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The orders of all devices.

    name: "gpipe", "1f1b", "interleaved" or "zero_bubble". num_chunks: stages that each device holds, above 1 with "interleaved" only.
    Raises ValueError for other names or numbers below 1, UnsupportedError for combinations that a schedule lacks.
    """
    if name not in ORDERS:
        raise ValueError(f"schedule is one of {', '.join(ORDERS)}, not {name!r}")
    for what, number in (("stages", num_devices), ("micro-batches", num_microbatches), ("chunks", num_chunks)):
        if number < 1:
            raise ValueError(f"the number of {what} is at least 1, not {number!r}")
    if num_chunks > 1 and name != "interleaved":
        raise UnsupportedError(f"{name} has one stage on each device; several go with the schedule interleaved")
    orders = tuple(tuple(ORDERS[name](d, num_devices, num_microbatches, num_chunks)) for d in range(num_devices))
    return Schedule(name, num_devices, num_microbatches, num_chunks, orders)
