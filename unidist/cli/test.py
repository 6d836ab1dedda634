"""`unidist test`: the contract's checks of backends on this machine, a line per point, an exit code for CI."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from unidist import registry
from unidist.errors import MissingDependencyError
from unidist.launchers.gpus import num_visible_gpus
from unidist.testing import outcomes
from unidist.testing.outcomes import Outcome
from unidist.testing.suite import check_names, find_entry, launch
from unidist.testing.table import POINTS

_SLOWEST = 10
_LINE_EVERY = 10.0  # seconds between the lines where no terminal shows a bar

console = Console(highlight=False, soft_wrap=True)


def test(
    backends: Annotated[list[str] | None, typer.Argument(metavar="BACKEND", help="Such as torch/ddp; all that are usable here.")] = None,
    devices: Annotated[
        int | None, typer.Option("-n", "--num-devices", min=1, help="Devices of each job; all visible GPUs, else 2.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Processes that share the devices, where one drives several (mirrored).")
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="A point's number, a check's name, or few.")] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep the workers' lines and output in this folder.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for each job.")] = 900.0,
    wait: Annotated[float, typer.Option("--wait", min=1.0, help="Seconds that bound each wait of the workers for each other.")] = 30.0,
) -> None:
    """Run the contract's checks on this machine: real workers, compared with one device computed in NumPy.

    A line per point of the contract. Exits with 1 when a check failed, with 0 otherwise.
    """
    n = devices or num_visible_gpus() or 2
    keys = [_usable(key) for key in backends] if backends else _all_usable()
    fine = True
    for key in keys:
        started = time.perf_counter()
        found = _run(key, n, list(only or []), keep / key.replace("/", "-") if keep is not None else None, timeout, wait, processes)
        _print_points(key, n, found, time.perf_counter() - started)
        fine = fine and all(outcome.fine for outcome in found)
    raise typer.Exit(0 if fine else 1)


def _usable(key: str) -> str:
    entry = find_entry(key)
    absent = entry.missing()
    if absent:
        raise MissingDependencyError(f"backend {entry.key!r} needs {' and '.join(absent)}: {entry.install}")
    return entry.key


def _all_usable() -> list[str]:
    for entry in registry.entries():
        if entry.missing():
            console.print(f"{entry.key} is left out: it needs {', '.join(entry.missing())} ({escape(entry.install)})", style="dim")
    return [entry.key for entry in registry.entries() if not entry.missing()]


def _run(key: str, n: int, only: list[str], folder: Path | None, timeout: float, wait: float, processes: int | None) -> list[Outcome]:
    """The launch, with a bar on a terminal and a line now and then elsewhere."""
    try:
        total = len(check_names(key, n, only))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{key} on {n}", total=total)
        done, told = 0, time.monotonic()

        def progress(outcome: Outcome) -> None:
            nonlocal done, told
            done += 1
            bar.update(task, completed=done, description=f"{key} on {n}: {POINTS[outcome.point]}")
            if not console.is_terminal and time.monotonic() - told >= _LINE_EVERY:
                told = time.monotonic()
                console.print(f"{key} on {n}: {done} of {total}, at {outcome.name}", style="dim")

        return launch(key, n, folder, timeout, only=only, wait=wait, progress=progress, processes=processes)


def _print_points(key: str, n: int, found: list[Outcome], seconds: float) -> None:
    console.print(f"[bold]{key}[/bold] on {n} device{'s' if n > 1 else ''}")
    for point, title in POINTS.items():
        mine = [outcome for outcome in found if outcome.point == point]
        if mine:
            style = None if all(outcome.fine for outcome in mine) else "red"
            console.print(f"  {point:>2}  {title:<28}  {_counts(mine):<44} {sum(o.seconds for o in mine):6.1f} s", style=style)
    console.print(f"      {'in all':<28}  {_counts(found):<44} {seconds:6.1f} s")
    for outcome in found:
        if not outcome.fine:
            console.print(f"\n[red]{outcome.name}[/red]: {escape(outcome.title)}")
            console.print(escape(outcome.message))
    slowest = sorted(found, key=lambda outcome: -outcome.seconds)[:_SLOWEST]
    console.print(f"  slowest: {', '.join(f'{o.name} {o.seconds:.1f} s' for o in slowest)}\n", style="dim")


def _counts(found: list[Outcome]) -> str:
    words = {outcomes.PASSED: "passed", outcomes.FAILED: "FAILED", outcomes.REFUSED: "refused", outcomes.NOT_APPLICABLE: "not applicable"}
    counts = {word: sum(outcome.status == status for outcome in found) for status, word in words.items()}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)
