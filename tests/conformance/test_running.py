"""`unidist.testing.run` for people's own tests: results by rank, errors with their traceback, and an end in time."""

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest

import unidist
from unidist.errors import LaunchError
from unidist.testing import run


@dataclass(frozen=True)
class Found:
    """A result of a class of this file."""

    rank: int
    total: int


def total(begin: int, factor: int = 1) -> Found:
    unidist.init()
    return Found(unidist.rank(), unidist.all_reduce(factor * (begin + unidist.rank()), "sum"))


def seen(name: str) -> str | None:
    return os.environ.get(name)


def fails(rank: int) -> None:
    unidist.init()
    if unidist.rank() == rank:
        raise KeyError("the key")
    unidist.barrier()


def dies() -> None:
    os._exit(7)


def sleeps() -> None:
    time.sleep(600)


def unpicklable() -> Any:
    return lambda: None


def decorated(function: Any) -> Any:
    return lambda: function()


@decorated
def hidden() -> None:
    """Not what its name says."""


def test_results_come_by_rank() -> None:
    assert run(total, 2, backend="ddp", args=(10, 2)) == [Found(0, 42), Found(1, 42)]


def test_the_environment_is_clean_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("MINE", "kept")
    assert run(seen, 1, args=("SLURM_PROCID",)) == [None]
    assert run(seen, 1, args=("MINE",)) == ["kept"]
    assert run(seen, 1, args=("OTHER",), environ={"OTHER": "set"}) == ["set"]


def test_an_error_is_raised_here_with_its_traceback_there() -> None:
    with pytest.raises(KeyError, match="the key") as caught:
        run(fails, 2, backend="ddp", args=(1,))
    assert "on rank 1" in str(caught.value.__cause__) and "in fails" in str(caught.value.__cause__)


def test_a_death_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="code 7"):
        run(dies, 1)


def test_a_job_that_does_not_end_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="out of time"):
        run(sleeps, 2, backend="ddp", timeout=2.0)
    assert time.monotonic() - started < 15.0


def test_a_result_that_cannot_travel() -> None:
    with pytest.raises((AttributeError, TypeError, LaunchError), match="pickle"):
        run(unpicklable, 1)


def test_functions_that_cannot_be_loaded() -> None:
    def local() -> None:
        """Inside a test."""

    for function in (local, lambda: None):
        with pytest.raises(ValueError, match="top level"):
            run(function, 1)
    with pytest.raises(ValueError, match="decorated"):
        run(seen.__class__(seen.__code__, seen.__globals__, "seen"), 1)
    with pytest.raises(ValueError, match="top level"):
        run(hidden, 1)
