"""`unidist backends`: every backend, whether it can be used here, or what is missing and the line that installs it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from unidist import registry


def backends() -> None:
    """Print a table of all backends: tier (1 is looked after best), processes, usable or what to install."""
    table = Table("backend", "tier", "processes", "here")
    for entry in registry.entries():
        absent = entry.missing()
        state = f"needs {', '.join(absent)}: {entry.install}" if absent else "usable"
        table.add_row(
            entry.key, str(entry.tier), "1 per host" if entry.one_process else "1 per device", state, style="dim" if absent else None
        )
    Console(soft_wrap=True).print(table)
