"""The suite's own parts: the table of checks, the merging of ranks, the comparisons; the checks themselves run in tests/conformance."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unidist.testing import compare, outcomes
from unidist.testing.outcomes import FAILED, NOT_APPLICABLE, PASSED, REFUSED, STARTED, Outcome
from unidist.testing.suite import check_names
from unidist.testing.table import POINTS, checks_of, select


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_point_has_checks_with_names_of_their_own(framework: str) -> None:
    checks = checks_of(framework)
    assert len({check.name for check in checks}) == len(checks)
    assert {check.point for check in checks} == set(POINTS)
    assert all(check.name.startswith(f"{check.point}-") and check.title for check in checks)
    assert {check.flavour for check in checks} == ({"native", "keras"} if framework == "torch" else {"keras"})


def test_selection() -> None:
    checks = checks_of("torch")
    assert not any(check.ends_job for check in select(checks))
    assert {check.point for check in select(checks, ["4", "6-momentum"])} == {4, 6}
    assert [check.name for check in select(checks, ["6-momentum"])] == ["6-momentum"]
    assert [check.name for check in select(checks, ["5-reentrant"])] == ["5-reentrant"]
    assert all(check.few for check in select(checks, ["few"]))
    assert {check.point for check in select(checks, ["few"])} >= {1, 2, 3, 4, 5, 6, 8, 9, 10, 11}
    assert "9-exit" in check_names("torch/ddp", 2)
    with pytest.raises(ValueError, match="'4-clip'"):
        check_names("torch/ddp", 2, ["4-clip"])


def test_listing_the_checks_imports_no_framework() -> None:
    listing = "from unidist.testing.suite import check_names; check_names('torch/ddp', 2)"
    code = f"import sys; {listing}; print({{'torch', 'tensorflow', 'keras'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.stderr) == ("set()\n", "")


def row(status: str, message: str = "") -> dict[str, Outcome]:
    return {"4-clip": Outcome("4-clip", 4, "clipped", status, 0.5, message)}


@pytest.mark.parametrize(
    ("ranks", "status", "text"),
    [
        ([row(PASSED), row(PASSED)], PASSED, ""),
        ([row(REFUSED, "no clipping"), row(REFUSED, "no clipping")], REFUSED, "no clipping"),
        ([row(PASSED), row(FAILED, "off by 1")], FAILED, "rank 1: off by 1"),
        ([row(PASSED), row(REFUSED)], FAILED, "different ends"),
        ([row(PASSED), row(NOT_APPLICABLE)], FAILED, "different ends"),
        ([row(PASSED), row(STARTED)], FAILED, "rank 1: ended inside this check: code 7"),
        ([row(PASSED), {}], FAILED, "rank 1: not reached: code 7"),
        ([{}, {}], FAILED, "not reached: code 7"),
    ],
)
def test_a_check_passes_only_if_all_ranks_passed(ranks: list[dict[str, Outcome]], status: str, text: str) -> None:
    (merged,) = outcomes.merge(ranks, {"4-clip": (4, "clipped")}, "code 7")
    assert (merged.status, merged.point, merged.title) == (status, 4, "clipped")
    assert text in merged.message


def test_lines_survive_a_crash_in_the_middle_of_one(tmp_path: Path) -> None:
    outcomes.write(tmp_path, 0, row(STARTED)["4-clip"])
    outcomes.write(tmp_path, 0, row(PASSED)["4-clip"])
    with outcomes.path_of(tmp_path, 0).open("a") as file:
        file.write('{"name": "5-fro')
    assert outcomes.read(tmp_path, 0) == row(PASSED)
    assert outcomes.read(tmp_path, 1) == {}


@pytest.mark.parametrize(
    ("actual", "truth"),
    [
        (1.0 + 2e-6, 1.0), (float("nan"), 1.0), ([1.0, 2.0], [1.0]), ({"a": 1.0}, {"b": 1.0}), ({"a": [1.0]}, {"a": [2.0]}),
        ([1.0, np.inf], [1.0, np.inf]),
    ],
)  # fmt: skip
def test_close_fails(actual: object, truth: object) -> None:
    with pytest.raises(AssertionError):
        compare.close(actual, truth, 1e-6)


def test_close_passes() -> None:
    compare.close({"a": np.array([1e6 + 0.5]), "b": 1}, {"a": [1e6], "b": 1.0}, 1e-6, "values")
    compare.close(np.zeros((0, 2)), np.zeros((0, 2)), 0.0)


def test_same_is_bit_for_bit() -> None:
    compare.same(np.array([1.0]), np.array([1.0]))
    for other in (np.array([1], "int64"), np.array([1.0], "float32"), np.array([1.0, 1.0]), np.array([np.nextafter(1.0, 2.0)])):
        with pytest.raises(AssertionError):
            compare.same(other, np.array([1.0]))


def test_raises_wants_the_error_and_its_words() -> None:
    with compare.raises(ValueError, "Some", "words"):
        raise ValueError("some words")
    with pytest.raises(AssertionError, match="'other'"), compare.raises(ValueError, "other"):
        raise ValueError("some words")
    with pytest.raises(AssertionError, match="was not raised"), compare.raises(ValueError):
        pass
    with pytest.raises(KeyError), compare.raises(ValueError):
        raise KeyError
