"""Launches of checks: what the session needs runs two at a time; its end says how long each took and which checks were the slowest."""

from typing import Any

import pytest

from unidist.testing import plugin


def pytest_collection_finish(session: pytest.Session) -> None:
    plugin.schedule(session.items)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    plugin.summary(terminalreporter)
