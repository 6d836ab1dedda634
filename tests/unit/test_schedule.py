"""Pipeline schedules: complete and free of deadlocks for all sizes, with the bubbles and memory that their papers give."""

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.errors import UnsupportedError
from unidist.pipeline.drawing import grid, svg
from unidist.pipeline.orders import BACKWARD, FORWARD, INPUT, ORDERS, WEIGHT, make_schedule
from unidist.pipeline.timeline import Times, simulate

SIZES = st.tuples(st.sampled_from(list(ORDERS)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))


def made(size):
    name, devices, microbatches, chunks = size
    if name == "interleaved":
        return make_schedule(name, devices, microbatches * devices, chunks)
    return make_schedule(name, devices, microbatches)


@settings(deadline=None)
@given(SIZES, st.lists(st.floats(0.125, 4.0), min_size=4, max_size=4))
def test_every_pass_runs_once_and_after_what_it_needs(size, durations):
    schedule = made(size)
    stages = range(schedule.num_stages)
    times = Times(*([durations[i] * (1 + stage % 3) for stage in stages] for i in range(3)), transfer=durations[3])
    timeline = simulate(schedule, times)
    ends = {span.action: span.end for span in timeline.spans}
    kinds = (FORWARD, INPUT, WEIGHT) if schedule.splits_backward else (FORWARD, BACKWARD)
    expected = set(itertools.product(kinds, range(schedule.num_microbatches), stages))
    assert {(a.kind, a.microbatch, a.stage) for a in ends} == expected and len(timeline.spans) == len(expected)
    for span in timeline.spans:
        assert schedule.device_of(span.action.stage) == span.device
        if span.action.kind == FORWARD and span.action.stage:
            before = next(
                end
                for a, end in ends.items()
                if (a.kind, a.microbatch, a.stage) == (FORWARD, span.action.microbatch, span.action.stage - 1)
            )  # noqa: E501
            assert span.start >= before + times.transfer
    for device in range(schedule.num_devices):
        mine = sorted((s for s in timeline.spans if s.device == device), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(mine, mine[1:]))
    assert 0.0 <= timeline.bubble < 1.0


@pytest.mark.parametrize("devices, microbatches", [(1, 4), (2, 2), (4, 8), (6, 7)])
def test_bubbles_of_equal_stages(devices, microbatches):
    """(S - 1) / (M + S - 1) for GPipe and 1F1B; its V-th part for V chunks."""
    for name in ("gpipe", "1f1b"):
        assert simulate(make_schedule(name, devices, microbatches)).bubble == pytest.approx((devices - 1) / (microbatches + devices - 1))
    chunked = simulate(make_schedule("interleaved", devices, microbatches * devices, 3))
    idle = (devices - 1) / 3
    assert chunked.bubble == pytest.approx(idle / (microbatches * devices + idle))


def test_zero_bubble_waits_a_third_of_1f1b():
    """With F = I = W the idle time of a device is (S - 1)(F + I - W) in place of (S - 1)(F + I + W)."""
    devices, microbatches = 4, 12
    plain = simulate(make_schedule("1f1b", devices, microbatches))
    zero = simulate(make_schedule("zero_bubble", devices, microbatches))
    work = 3 * microbatches
    assert plain.length == pytest.approx(work + 3 * (devices - 1)) and zero.length == pytest.approx(work + devices - 1)


def test_memory():
    assert simulate(make_schedule("gpipe", 3, 8)).peak_activations() == [8, 8, 8]
    assert simulate(make_schedule("1f1b", 3, 8)).peak_activations() == [3, 2, 1]
    assert simulate(make_schedule("1f1b", 3, 2)).peak_activations() == [2, 2, 1]
    assert max(simulate(make_schedule("zero_bubble", 4, 12)).peak_activations()) == 4


def test_what_cannot_be():
    with pytest.raises(ValueError, match="gpipe, 1f1b"):
        make_schedule("dfs", 2, 2)
    with pytest.raises(ValueError, match="micro-batches"):
        make_schedule("1f1b", 2, 0)
    with pytest.raises(UnsupportedError, match="multiple of 4"):
        make_schedule("interleaved", 4, 6, 2)
    with pytest.raises(UnsupportedError, match="interleaved"):
        make_schedule("1f1b", 4, 6, 2)


@settings(deadline=None)
@given(SIZES)
def test_drawings(size):
    timeline = simulate(made(size))
    widths = [sum(cell.width for cell in row) for row in grid(timeline)]
    assert min(widths) > 0 and len(widths) == timeline.schedule.num_devices
    numbers = [cell.text for row in grid(timeline) for cell in row if cell.kind is not None]
    assert len(numbers) == len(timeline.spans)
    drawn = ElementTree.fromstring(svg(timeline)).iter("{http://www.w3.org/2000/svg}rect")
    assert len(list(drawn)) >= len(timeline.spans)
