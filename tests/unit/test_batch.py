"""Shares, windows and what was drawn: plain numbers, checked against the definition of one device's mean."""

import numpy
import pytest

from unidist.batch import Share, ShareLog, Window, split_sizes


def test_pieces_are_a_partition_and_differ_by_at_most_one():
    for total in range(0, 30):
        for parts in range(1, 7):
            sizes = split_sizes(total, parts)
            assert sum(sizes) == total and len(sizes) == parts
            assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


def test_scaled_local_means_average_to_the_global_mean():
    values = numpy.random.default_rng(0).normal(size=29)
    sizes = split_sizes(29, 4)
    begins = numpy.cumsum([0, *sizes])
    scaled = [values[begins[r] : begins[r + 1]].mean() * Share(sizes, r).scale for r in range(4)]
    assert numpy.mean(scaled) == pytest.approx(values.mean(), rel=1e-12)


def test_a_process_with_several_replicas_counts_as_their_sum():
    share = Share((3, 2, 2, 2), first=2, local=2)
    assert share.size == 4 and share.local_sizes == (2, 2) and share.index == 2
    assert share.scale == pytest.approx(4 * 2 / 9)


def test_even_shares_have_scale_one_and_empty_ones_zero():
    assert Share((4, 4), 1).even and Share((4, 4), 1).scale == 1.0
    assert not Share((1, 0), 1).even and Share((1, 0), 1).scale == 0.0 and Share((0, 0), 0).scale == 0.0


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_window_is_one_large_batch(k):
    """Factors and correction of any windows bring the sum of local means to the mean over all samples of the window."""
    rng = numpy.random.default_rng(k)
    batches = [split_sizes(int(n), 2) for n in (7, 8, 8, 3, 1, 6, 2)]
    window = [Window(k, 2), Window(k, 2)]
    sums, seen = [0.0, 0.0], []
    for number, sizes in enumerate(batches):
        last = number == len(batches) - 1
        seen.append([rng.normal(size=size) for size in sizes])
        for rank in range(2):
            factor = window[rank].add(Share(sizes, rank, last=last))
            local = seen[-1][rank]
            sums[rank] += factor * (local.mean() if len(local) else 0.0)
        if window[0].complete:
            exact = numpy.concatenate([v for batch in seen for v in batch]).mean()
            assert numpy.mean(sums) * window[0].correction == pytest.approx(exact, rel=1e-12)
            sums, seen = [0.0, 0.0], []
    assert not seen, "the window was not flushed at the end of the epoch"


def test_a_full_window_of_even_batches_needs_no_correction():
    window = Window(2, 2)
    for _ in range(2):
        assert window.add(Share((4, 4), 0)) == 0.5
    assert window.complete and window.correction == 1.0


def test_batches_without_a_share_count_equally():
    window = Window(4, 3)
    assert [window.add(None) for _ in range(4)] == [0.25] * 4 and window.complete


def test_the_last_drawn_share_counts_until_the_next_is_drawn():
    log = ShareLog()
    assert log.seen().scale == 1.0
    log.draw(Share((2, 1), 1))
    assert log.seen().scale == pytest.approx(2 / 3) and log.seen().scale == pytest.approx(2 / 3)
    assert log.take() == Share((2, 1), 1), "a step after a bare forward pass still knows its batch"
    assert log.seen().scale == 1.0, "inside the step the passes count as they are"
    log.draw(None)
    assert log.seen().scale == 1.0


def test_two_different_shares_before_one_pass_are_ambiguous():
    log = ShareLog()
    log.draw(Share((2, 1), 0))
    log.draw(Share((2, 2), 0))
    with pytest.raises(ValueError, match="share=data.share"):
        log.seen()
    log.draw(Share((2, 2), 0))
    log.draw(Share((3, 3), 0))
    assert log.seen().scale == 1.0, "shares that count alike are no problem"
