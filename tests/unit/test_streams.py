"""Streams of several processes keep in step, and are repeatable, whatever their lengths; two ranks are two threads."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from unidist.errors import MismatchError
from unidist.plans import GlobalPlan, ShardedPlan
from unidist.streams import global_generators, in_step, repeatable


class Meeting:
    """Rounds of a control plane between threads; `count` of them were held."""

    def __init__(self, size):
        self.size, self.count = size, 0
        self._rows, self._lock = [None] * size, threading.Barrier(size, timeout=20)

    def at(self, rank):
        return type("Control", (), {"size": self.size, "rank": rank, "gather": lambda _, name, row: self._gather(rank, row)})()

    def _gather(self, rank, row):
        self._rows[rank] = row
        self._lock.wait()
        rows = list(self._rows)
        self.count += rank == 0
        self._lock.wait()
        return rows


def on_ranks(work, size=2):
    """What `work(rank, control)` comes to on each rank: its result, or the error."""
    meeting = Meeting(size)

    def run(rank):
        try:
            return work(rank, meeting.at(rank))
        except MismatchError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), meeting.count


def parts(lengths, batch, drop_last=False):
    def work(rank, control):
        plan = ShardedPlan(None, batch, len(lengths), rank, 1, False, drop_last, 0, control=control)
        return [(share, items) for share, items in plan.batches(iter(range(lengths[rank])))]

    return on_ranks(work, len(lengths))


@pytest.mark.parametrize("lengths", [(3, 2), (1, 1), (64, 64), (65, 64), (66, 1), (31, 33), (200, 130), (7, 3, 5)])
def test_parts_end_together_and_only_the_last_step_says_so(lengths):
    found, rounds = parts(lengths, len(lengths))
    for rank, steps in enumerate(found):
        assert [v for share, items in steps for v in items[: share.size]] == list(range(lengths[rank]))
        assert all(items for _, items in steps), "an empty share borrows a sample"
        assert [share.last for share, _ in steps] == [False] * (max(lengths) - 1) + [True]
        assert [share.sizes for share, _ in steps] == [tuple(int(step < n) for n in lengths) for step in range(max(lengths))]
    assert rounds <= 6 + max(lengths) // 32


@pytest.mark.parametrize("lengths, steps", [((5, 3), 1), ((4, 4), 2), ((65, 200), 32), ((1, 4), 0), ((0, 0), 0)])
def test_parts_that_drop_what_is_not_whole(lengths, steps):
    found, _ = parts(lengths, 4, drop_last=True)
    for rows in found:
        assert [share.sizes for share, _ in rows] == [(2, 2)] * steps
        assert [share.last for share, _ in rows] == ([False] * (steps - 1) + [True])[:steps]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_rank_without_a_sample_is_told_to_all(drop_last):
    found, _ = parts((3, 0), 2, drop_last)
    assert all(isinstance(error, MismatchError) and "rank 1 has no sample at all" in str(error) for error in found)


def whole(lengths, batch=2):
    def work(rank, control):
        plan = GlobalPlan(None, batch, len(lengths), rank, 1, False, False, 0)
        return [share for share, _ in in_step(control, plan.batches(iter(range(lengths[rank]))))]

    return on_ranks(work, len(lengths))


def test_whole_streams_of_one_length():
    for length in (0, 1, 5, 64, 131):
        found, _ = whole((length, length))
        assert len(found[0]) == len(found[1]) == -(-length // 2)


@pytest.mark.parametrize("lengths", [(10, 8), (0, 1), (64, 66), (67, 68), (300, 100)])
def test_whole_streams_of_different_lengths_raise_on_all(lengths):
    found, _ = whole(lengths)
    assert all(isinstance(error, MismatchError) and "already_sharded=True" in str(error) for error in found)


def test_reading_keeps_up_with_yielding():
    """A loader's workers are asked for a part with each step, not for 32 at once."""
    asked = []

    def counted():
        for number in range(200):
            asked.append(number)
            yield number

    def work(rank, control):
        from unidist.streams import agreed

        leads = []
        for number, step in enumerate(agreed(control, counted() if rank else iter(range(200)), lambda part: 1)):
            assert step.mine == number
            leads.append(len(asked) - number if rank else 0)
        return leads

    (_, leads), _ = on_ranks(work)
    assert leads[0] <= 2 and max(leads) <= 33
    assert json.dumps(leads[70:150]) == json.dumps([33] * 80)


def drawing(count):
    for _ in range(count):
        yield random.random(), float(numpy.random.rand())


def test_what_a_stream_draws_is_its_own():
    random.seed(1)
    numpy.random.seed(1)
    before = random.random(), float(numpy.random.rand())
    random.seed(1)
    numpy.random.seed(1)
    steps = repeatable(lambda: drawing(3), global_generators(), 7, 0)
    first = next(steps)
    assert (random.random(), float(numpy.random.rand())) == before
    rest = list(steps)
    assert [first, *rest] == list(repeatable(lambda: drawing(3), global_generators(), 7, 0))
    assert [first, *rest] != list(repeatable(lambda: drawing(3), global_generators(), 7, 1))
    assert len({first, *rest}) == 3
