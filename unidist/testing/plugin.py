"""The checks as pytest tests, for the built-in backends and for anyone's: each launch once, each check a test.

from unidist.testing.plugin import conformance

test_mykey = conformance("torch/mykey", n=2)
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from unidist.testing import outcomes
from unidist.testing.outcomes import Outcome
from unidist.testing.suite import check_names, find_entry, launch
from unidist.testing.table import CONTRACT

REQUIRE = "UNIDIST_TRAIN_REQUIRE"
_SLOWEST = 10
_ALONGSIDE = 2  # launches at a time


def conformance(
    key: str, n: int = 2, *, only: tuple[str, ...] = (), timeout: float = 600.0, catalogue: str = CONTRACT,
    processes: int | None = None,
) -> Callable[..., None]:  # fmt: skip
    """A test function with one case for each check of the backend on n devices; assign it to a name that begins with test.

    The checks run together, in one launch, when the first of the cases does. A backend that can't run here skips, unless the variable
    UNIDIST_TRAIN_REQUIRE names it ("torch/ddp,torch/horovod", or "all"): then it fails. catalogue: a package of checks; it has to be
    importable here and in the workers. processes: that share the devices, where one may drive several ("mirrored").
    """

    @pytest.mark.parametrize("check", check_names(key, n, only, catalogue))
    def test(check: str) -> None:
        _present(key)
        outcome = results(key, n, only, timeout, catalogue, processes)[check]
        if outcome.status == outcomes.NOT_APPLICABLE:
            pytest.skip(outcome.message)
        if outcome.status == outcomes.FAILED:
            pytest.fail(f"{key} on {n}: {outcome.title}\n{outcome.message}", pytrace=False)

    test.launch = (key, n, only, timeout, catalogue, processes)  # type: ignore[attr-defined]
    return test


@dataclass(frozen=True)
class Launched:
    """One launch of this session: what it was, how long it took, what each check came to."""

    label: str
    seconds: float
    outcomes: Mapping[str, Outcome]


_Launch = tuple[str, int, tuple[str, ...], float, str, int | None]
_waiting: list[_Launch] = []
_launched: dict[_Launch, Future[Launched]] = {}
_pool = ThreadPoolExecutor(_ALONGSIDE)


def schedule(items: Sequence[pytest.Item]) -> None:
    """For `pytest_collection_finish` of a conftest.py: the launches of these tests then run two at a time, not one by one."""
    wanted = [getattr(getattr(item, "function", None), "launch", None) for item in items]
    _waiting[:] = [launch for launch in dict.fromkeys(wanted) if launch is not None and not find_entry(launch[0]).missing()]


def results(*what: Any) -> Mapping[str, Outcome]:
    """What the checks came to by name; launched at the first call of a session, with those that `schedule` knows."""
    for one in dict.fromkeys([what, *_waiting]):
        if one not in _launched:
            _launched[one] = _pool.submit(_launch, *one)
    return _launched[what].result().outcomes


def _launch(key: str, n: int, only: tuple[str, ...], timeout: float, catalogue: str, processes: int | None) -> Launched:
    started = time.perf_counter()
    found = {o.name: o for o in launch(key, n, timeout=timeout, only=only, catalogue=catalogue, processes=processes)}
    label = f"{key} on {n}{f' in {processes} processes' if processes else ''}"
    return Launched(label if catalogue == CONTRACT else f"{catalogue}: {label}", time.perf_counter() - started, found)


def _present(key: str) -> None:
    absent = find_entry(key).missing()
    if not absent:
        return
    required = {name.strip() for name in os.environ.get(REQUIRE, "").split(",")}
    if required & {key, "all"}:
        pytest.fail(f"{REQUIRE} names {key}, which needs {', '.join(absent)}: {find_entry(key).install}", pytrace=False)
    pytest.skip(f"{key} needs {', '.join(absent)}")


def summary(terminal: Any) -> None:
    """Print each launch of this session and the slowest checks; for `pytest_terminal_summary` of a conftest.py."""
    done = [future.result() for future in _launched.values() if future.done() and future.exception() is None]
    for one in done:
        counts = Counter(outcome.status for outcome in one.outcomes.values())
        terminal.write_line(f"{one.label}: {one.seconds:.1f} s, {', '.join(f'{count} {status}' for status, count in counts.items())}")
    rows = [(outcome.seconds, one.label, outcome.name) for one in done for outcome in one.outcomes.values()]
    for seconds, label, name in sorted(rows, reverse=True)[:_SLOWEST]:
        terminal.write_line(f"{seconds:7.2f} s  {label}  {name}")
