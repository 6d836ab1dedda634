"""Says at the end of a session how long each launch took, and which checks were the slowest."""

from typing import Any

from unidist.testing import plugin


def pytest_terminal_summary(terminalreporter: Any) -> None:
    plugin.summary(terminalreporter)
