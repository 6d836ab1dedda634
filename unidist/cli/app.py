"""The typer app. A command's module is imported when the command is called, so that `run` starts quickly and --help always works."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class Command:
    """Where a command lives: "module:name" of a function, or of a typer app with commands of its own."""

    target: str
    help: str
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        return _named(found if isinstance(found, typer.Typer) else _single(found, context_settings=self.settings), name)

    def line(self, name: str) -> Any:
        """What the list of commands shows, without the command's module."""
        return _named(_single(lambda: None, help=self.help), name)


def _single(function: Callable[..., None], **settings: Any) -> typer.Typer:
    single = typer.Typer(add_completion=False)
    single.command(**settings)(function)
    return single


def _named(app: typer.Typer, name: str) -> Any:
    command = typer.main.get_command(app)
    command.name = name
    return command


COMMANDS = {
    # Options after the script's name are the script's.
    "run": Command("unidist.cli.run:run", "Run a script on N devices of this host.", {"allow_interspersed_args": False}),
    "test": Command("unidist.cli.test:test", "Check a backend's contract on this machine."),
    "demo": Command("unidist.cli.demo:demo", "Train one script under every backend, and compare what they learned."),
    "backends": Command("unidist.cli.backends:backends", "List the backends, and what each needs to run here."),
    "env": Command("unidist.cli.env:env", "Show what was found here, and what unidist.init would make of it."),
    "devices": Command("unidist.cli.devices:devices", "Show GPUs, CPU cores and memory of this host, or of a whole job."),
    "schedule": Command("unidist.cli.schedule:schedule", "Show which device of a pipeline does what when."),
    "install": Command("unidist.cli.install:install_app", "Install what a plain `pip install` can't."),
}


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return COMMANDS[cmd_name].line(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, COMMANDS[str(name)].load(str(name)), rest


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def unidist() -> None:
    """Distributed training over PyTorch and TensorFlow: start jobs, and look at what a machine can run."""
