"""Launches of checks run two at a time; the end says how long each took, what was slowest, and what each part of the suite may take."""

from collections import Counter
from typing import Any

import pytest

from unidist.testing import plugin

# Minutes on two cores, by folders; a part that takes half as long again fails the run, since a slow suite is not run.
BUDGETS = {
    "foundation": (14.0, ("unit", "tensorflow", "launch", "conformance", "examples")),
    "contract and Keras": (16.0, ("field", "fuzz")),
}
_spent: Counter[str] = Counter()


def pytest_collection_finish(session: pytest.Session) -> None:
    plugin.schedule(session.items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.split("/")[1] if report.nodeid.startswith("tests/") else ""
    for part, (_, folders) in BUDGETS.items():
        _spent[part] += report.duration * (folder in folders)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    plugin.summary(terminalreporter)
    for part, (minutes, _) in BUDGETS.items():
        terminalreporter.write_line(f"{part}: {_spent[part] / 60:.1f} of {minutes:g} minutes")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and any(_spent[part] > 90 * minutes for part, (minutes, _) in BUDGETS.items()):
        session.exitstatus = 1
