"""The cut of a chain of layers: as good as the best of all cuts, within each device's memory."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.errors import UnsupportedError
from unidist.pipeline.partition import Devices, Layers, best_cut, checked_cut

NUMBERS = st.floats(0.0, 8.0)


@st.composite
def problems(draw):
    n = draw(st.integers(1, 8))
    parts = draw(st.integers(1, min(n, 4)))
    numbers = st.lists(NUMBERS, min_size=n, max_size=n)
    limits = draw(st.one_of(st.just(()), st.lists(st.floats(2.0, 30.0), min_size=parts, max_size=parts)))
    layers = Layers([f"layer {i}" for i in range(n)], draw(numbers), draw(numbers), draw(st.one_of(st.just(()), numbers)))
    return layers, Devices(draw(st.lists(st.floats(0.25, 4.0), min_size=parts, max_size=parts)), limits)


def all_cuts(layers, devices):
    n, parts = len(layers.names), len(devices.speeds)
    for boundaries in itertools.combinations(range(1, n), parts - 1):
        try:
            yield checked_cut(layers, devices, boundaries)
        except UnsupportedError:
            continue


@settings(deadline=None)
@given(problems())
def test_no_cut_is_better(problem):
    layers, devices = problem
    slowest = [cut.slowest for cut in all_cuts(layers, devices)]
    if not slowest:
        with pytest.raises(UnsupportedError, match="no cut"):
            best_cut(layers, devices)
        return
    found = best_cut(layers, devices)
    assert found.slowest == pytest.approx(min(slowest), abs=1e-9)
    stages = found.stages(len(layers.names))
    assert [i for stage in stages for i in stage] == list(range(len(layers.names))) and all(stages)


def test_a_heavy_layer_stands_alone():
    layers = Layers("abcde", [1.0, 1.0, 4.0, 1.0, 1.0])
    assert best_cut(layers, Devices.equal(3)).boundaries == (2, 3)
    assert best_cut(layers, Devices([1.0, 3.0])).boundaries == (2,)


def test_a_narrow_place_is_preferred():
    layers = Layers("abcd", [1.0, 1.0, 1.0, 1.0], crossing=[0.0, 3.0, 0.0, 0.0])
    assert best_cut(layers, Devices.equal(2)).boundaries in ((1,), (3,))


def test_messages():
    layers = Layers(["embedding", "head"], [1.0, 1.0], memory=[9.0, 1.0])
    with pytest.raises(ValueError, match="2 layers can't be cut into 3"):
        best_cut(layers, Devices.equal(3))
    with pytest.raises(UnsupportedError, match=r"the largest \(embedding\) 9"):
        best_cut(layers, Devices([1.0, 1.0], [8.0, 8.0]))
    with pytest.raises(UnsupportedError, match="stage 0 .*needs 9 bytes.*has 8"):
        checked_cut(layers, Devices([1.0, 1.0], [8.0, 8.0]), [1])
    for wrong in ([], [0], [2], [1, 1]):
        with pytest.raises(ValueError, match="increasing"):
            checked_cut(layers, Devices.equal(2), wrong)
    with pytest.raises(ValueError, match="1 numbers for 2 layers"):
        Layers("ab", [1.0])
