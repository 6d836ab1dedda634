"""`unidist devices`: the GPUs, cores and memory of this host, or of every host of the job that this command runs in."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from unidist.cli.device_tables import host_view
from unidist.hardware.inventory import read_devices
from unidist.hardware.records import Devices

_INTERVAL = 2.0  # seconds between two looks
_WAIT = 60.0  # seconds that the ranks wait for each other
_WIDE = 160  # columns where no terminal sets them, so that UUIDs stay in one piece

Look = Callable[[], list[Devices]]


def devices(
    seconds: Annotated[float | None, typer.Argument(min=0.1, metavar="SECONDS", help="With --watch: between two looks; 2.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object; with --watch one a line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, in place, until Ctrl-C.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="All hosts of the job, as in: unidist run -n 4 unidist devices --cluster")
    ] = False,
) -> None:
    """Show the GPUs of this host, CUDA's numbers for them, and the CPU cores and memory that a process here may use.

    What can't be found out is shown with the reason. No framework is imported, and no CUDA context is made.
    """
    if seconds is not None and not watch:
        raise typer.BadParameter("a number of seconds goes with --watch", param_hint="SECONDS")
    if cluster:
        _of_the_job(as_json, seconds or _INTERVAL if watch else None)
    else:
        _show(lambda: [read_devices()], as_json, seconds or _INTERVAL if watch else None)


def _of_the_job(as_json: bool, interval: float | None) -> None:
    """Every rank looks, rank 0 shows."""
    from unidist.control import connect
    from unidist.hardware.cluster import gather_devices
    from unidist.world import read_world

    world = read_world(os.environ)
    control = connect(world, os.environ, float(os.environ.get("UNIDIST_TRAIN_TIMEOUT") or _WAIT))
    try:
        _show(lambda: gather_devices(control, world), as_json, interval, quiet=world.rank != 0)
    finally:
        control.close()


def _show(look: Look, as_json: bool, interval: float | None, quiet: bool = False) -> None:
    """Once, or with an interval until Ctrl-C, which is the way to end it and no error."""
    if interval is None:
        found = look()
        if not quiet:
            _print(found, as_json)
        return
    try:
        _watch(look, as_json, interval, quiet)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _watch(look: Look, as_json: bool, interval: float, quiet: bool) -> None:
    console = _console()
    if quiet or as_json or not console.is_terminal:
        while True:
            found = look()
            if not quiet:
                _print(found, as_json, one_line=True)
            time.sleep(interval)
    view = _timed(look(), interval)
    try:
        with Live(view, console=console, auto_refresh=False, vertical_overflow="crop", screen=True) as live:
            while True:
                time.sleep(interval)
                view = _timed(look(), interval)
                live.update(view, refresh=True)
    finally:
        console.print(view)  # the last look stays on the terminal


def _print(found: list[Devices], as_json: bool, one_line: bool = False) -> None:
    if as_json:
        rows = [host.to_dict() for host in found]
        print(json.dumps(rows[0] if len(rows) == 1 and not found[0].host.ranks else rows, indent=None if one_line else 2), flush=True)
    else:
        _console().print(_view(found))


def _timed(found: list[Devices], interval: float) -> Group:
    return Group(Text(f"{time.strftime('%H:%M:%S')}, every {interval:g} s, Ctrl-C ends", style="dim"), _view(found))


def _view(found: list[Devices]) -> Group:
    return Group(*(host_view(host) for host in found))


def _console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names may hold what a terminal of another encoding can't show
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_WIDE)
