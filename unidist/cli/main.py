"""The entry point of the command line: checks what it needs, and turns unidist's own errors into one line and a code."""

import importlib.util
import sys

from unidist.cli.identity import check_not_modin
from unidist.errors import MissingDependencyError, UnidistError


def main() -> None:
    """Runs `unidist ...`. Exits with 1 after an error of unidist's own, with 2 after a wrong command line."""
    try:
        check_not_modin()
        _run_app()
    except UnidistError as error:
        print(f"unidist: {error}", file=sys.stderr)
        sys.exit(1)


def _run_app() -> None:
    if importlib.util.find_spec("typer") is None:
        raise MissingDependencyError("the command line needs typer, which this environment lacks: pip install 'unidist-train[cli]'")
    from unidist.cli.app import app

    app()
