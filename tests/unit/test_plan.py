"""Plans of shares: over one epoch the shares are a partition of the data, in order, and all ranks take the same steps."""

import itertools

import numpy
import pytest

from unidist.data import Source, check_size
from unidist.plans import GlobalPlan, ShardedPlan


def plans(n, batch, ranks, *, shuffle=False, drop_last=False, seed=0):
    return [GlobalPlan(n, batch, ranks, rank, 1, shuffle, drop_last, seed) for rank in range(ranks)]


@pytest.mark.parametrize("n, batch, ranks", [(10, 4, 2), (10, 3, 2), (1, 4, 3), (29, 8, 3), (5, 1, 2), (0, 4, 2)])
def test_an_epoch_is_a_partition_in_order(n, batch, ranks):
    steps = [list(plan.indices(0, 0)) for plan in plans(n, batch, ranks)]
    assert len({len(s) for s in steps}) == 1 and len(steps[0]) == -(-n // batch)
    seen = []
    for position in range(len(steps[0])):
        for rank in range(ranks):
            share, indices = steps[rank][position]
            assert len(indices) == max(share.size, 1), "an empty share borrows one sample"
            seen.extend(indices[: share.size])
            assert share.last == (position == len(steps[0]) - 1)
    assert seen == list(range(n))


def test_the_example_of_the_contract():
    steps = [[list(i[: s.size]) for s, i in plan.indices(0, 0)] for plan in plans(10, 4, 2)]
    assert steps == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_the_order_changes_with_the_epoch_and_repeats_with_the_seed():
    one, other = plans(50, 8, 1, shuffle=True)[0], plans(50, 8, 1, shuffle=True, seed=1)[0]
    again = plans(50, 8, 1, shuffle=True)[0]
    assert list(one.order(0)) == list(again.order(0)) != list(one.order(1))
    assert list(one.order(0)) != list(other.order(0)) and sorted(one.order(3)) == list(range(50))


def test_drop_last_drops_the_same_samples_everywhere():
    assert {plan.num_steps for plan in plans(10, 4, 2, drop_last=True)} == {2}
    assert plans(3, 4, 2, drop_last=True)[0].num_steps == 0


@pytest.mark.parametrize("n, batch, ranks", [(10, 4, 2), (9, 4, 3), (1, 4, 2)])
def test_streams_are_dealt_out_as_data_of_known_length(n, batch, ranks):
    for plan in plans(n, batch, ranks):
        known = [(share, list(indices)) for share, indices in plan.indices(0, 0)]
        streamed = list(GlobalPlan(None, batch, ranks, plan.first, 1, False, False, 0).batches(iter(range(n))))
        assert [(s, [int(i) for i in items][: s.size]) for s, items in known] == [(s, items[: s.size]) for s, items in streamed]


def sharded(lengths, batch, *, drop_last=False):
    count = len(lengths)
    return [ShardedPlan(n, batch, count, r, 1, False, drop_last, 0, lengths=tuple(lengths)) for r, n in enumerate(lengths)]


def test_parts_of_different_lengths_are_all_seen_and_steps_agree():
    both = sharded([5, 2], 4)
    assert [plan.num_steps for plan in both] == [3, 3]
    shares = [plan.share(step) for plan in both[:1] for step in range(3)]
    assert [share.sizes for share in shares] == [(2, 2), (2, 0), (1, 0)] and [s.last for s in shares] == [False, False, True]
    assert [list(i) for _, i in both[1].indices(0, 0)][0] == [0, 1]
    assert {plan.num_steps for plan in sharded([5, 2], 4, drop_last=True)} == {1}


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_data_shorter_than_four_ranks(n, drop_last, batch):
    steps = [list(plan.indices(0, 0)) for plan in plans(n, batch, 4, drop_last=drop_last)]
    counts = {len(s) for s in steps} | {plan.num_steps for plan in plans(n, batch, 4, drop_last=drop_last)}
    assert counts == {n // batch if drop_last else -(-n // batch)}
    assert all(len(indices) == max(share.size, 1) for rank in steps for share, indices in rank)
    dealt = [i for step in zip(*steps) for share, indices in step for i in indices[: share.size]]
    assert dealt == list(range(n // batch * batch if drop_last else n))


@pytest.mark.parametrize("sizes", [(None, None), (4, 2), (0, None), (None, -1), (True, None), (2.5, None)])
def test_a_batch_size_is_never_guessed(sizes):
    with pytest.raises(ValueError, match="global_batch_size|whole number"):
        check_size(Source(10, lambda plan: None), 2, *sizes)


def test_sizes():
    source = Source(10, lambda plan: None)
    assert check_size(source, 3, 8, None) == 8 and check_size(source, 3, None, 8) == 24
    assert check_size(source, 3, numpy.int64(8), None) == 8
    with pytest.raises(ValueError, match="makes its own batches"):
        check_size(Source(10, lambda plan: None, own_batches=True), 2, 4, None)


def test_resuming_at_a_step_gives_the_rest():
    plan = plans(20, 3, 2, shuffle=True)[1]
    whole = [list(i) for _, i in plan.indices(4, 0)]
    assert [list(i) for _, i in plan.indices(4, 5)] == whole[5:]
    assert list(itertools.chain(*whole))
