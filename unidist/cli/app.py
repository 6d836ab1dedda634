"""The typer app. Each command's module is imported when the command is called, so that `run` starts quickly."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class Command:
    """Where a command lives: "module:name" of a function, or of a typer app with commands of its own."""

    target: str
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(context_settings=self.settings)(function)
        command = typer.main.get_command(found)
        command.name = name
        return command


COMMANDS = {
    # Options after the script's name are the script's.
    "run": Command("unidist.cli.run:run", {"allow_interspersed_args": False}),
    "test": Command("unidist.cli.test:test"),
    "demo": Command("unidist.cli.demo:demo"),
    "backends": Command("unidist.cli.backends:backends"),
    "env": Command("unidist.cli.env:env"),
    "install": Command("unidist.cli.install:install_app"),
}


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return COMMANDS[cmd_name].load(cmd_name) if cmd_name in COMMANDS else None


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def unidist() -> None:
    """Distributed training over PyTorch and TensorFlow: start jobs, and look at what a machine can run."""
