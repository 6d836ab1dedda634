"""Launches of checks run two at a time; the end says how long each took, what was slowest, and what the suite may take."""

import time
from typing import Any

import pytest

from unidist.testing import plugin

# Minutes on two cores; a run that takes half as long again fails, since a slow suite is not run.
BUDGET = 28.0
_started = time.monotonic()


def pytest_collection_finish(session: pytest.Session) -> None:
    plugin.schedule(session.items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    plugin.summary(terminalreporter)
    terminalreporter.write_line(f"{(time.monotonic() - _started) / 60:.1f} of {BUDGET:g} minutes")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and time.monotonic() - _started > 90 * BUDGET:
        session.exitstatus = 1
