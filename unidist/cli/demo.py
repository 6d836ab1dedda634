"""`unidist demo`: train the digits example under every usable backend and print one table."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from unidist import demo as runs
from unidist.errors import MissingDependencyError
from unidist.frameworks import is_installed


def demo(epochs: Annotated[int, typer.Option("--epochs", min=1, help="Epochs of each run.")] = 10) -> None:
    """Train one unchanged script under every backend that this environment has, and compare what they learned with one device."""
    console = Console()
    todo = runs.usable_runs()
    for package, line in (("keras", "keras"), ("sklearn", "demo")):
        if not is_installed(package):
            raise MissingDependencyError(f"the demo needs {package}: pip install 'unidist-train[{line}]'")
    if not todo:
        raise MissingDependencyError("neither torch nor tensorflow is installed: pip install 'unidist-train[torch]' or '[tensorflow]'")
    outcomes = []
    for number, run in enumerate(todo, start=1):
        title = f"[{number}/{len(todo)}] {run[0]}/{run[1]}, {run[2]} device{'s' if run[2] > 1 else ''}"
        outcomes.append(_watched(console, title, run, epochs))
    filled, between = runs.compare(outcomes)
    console.print(_table(filled))
    wrong = [o for o in filled if o.difference > runs.ALLOWED]
    if between is not None:
        console.print(
            f"differences are of any weight after the first epoch, from local; the frameworks' local runs differ by {between:.1e}"
        )
        wrong = wrong or ([filled[0]] if between > runs.ALLOWED else [])
    if wrong:
        console.print("[bold red]a difference is larger than the allowed one[/]")
        raise typer.Exit(1)
    console.print("every backend learned what one device learned")


def _watched(console: Console, title: str, run: tuple[str, str, int], epochs: int) -> runs.Outcome:
    began = time.perf_counter()
    with console.status(title) as status:
        outcome = runs.train(run, epochs, lambda line: status.update(f"{title}: {line}"))
    console.print(f"{title}: loss {outcome.loss:.4f}, accuracy {outcome.accuracy:.4f} ({time.perf_counter() - began:.0f} s)")
    return outcome


def _table(outcomes: list[runs.Outcome]) -> Table:
    names = ("framework", "backend", "devices", "loss", "test\naccuracy", "samples/s", "differs\nby", "allowed")
    table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for o in outcomes:
        allowed = "-" if o.backend == "local" else f"{runs.ALLOWED:.0e}"
        table.add_row(
            o.framework, o.backend, str(o.devices), f"{o.loss:.4f}", f"{o.accuracy:.4f}", f"{o.speed:,.0f}",
            "-" if o.backend == "local" else f"{o.difference:.1e}", allowed,
        )  # fmt: skip
    return table
