"""`unidist install horovod`: build Horovod's last release for the frameworks of this Python, install it, and try it."""

import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unidist import horovod_build
from unidist.errors import UnidistError
from unidist.horovod_source import VERSION
from unidist.horovod_target import Target, find_target, gpu_visible
from unidist.horovod_verify import verify

LINE_EVERY = 20.0  # seconds between the lines of a build that no terminal shows

install_app = typer.Typer(no_args_is_help=True, add_completion=False, help="Install what a plain `pip install` can't.")
console = Console(highlight=False, soft_wrap=True)


@install_app.callback()
def choose() -> None:
    """Install what a plain `pip install` can't."""


@install_app.command("horovod")
def horovod(
    cpu: Annotated[bool, typer.Option("--cpu", help="Build without CUDA, also on a machine with GPUs.")] = False,
    wheel_dir: Annotated[Path | None, typer.Option(help="Take the wheel from this folder if it is there, and put it there if not.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not try the result with two workers.")] = False,
) -> None:
    """Build Horovod for the PyTorch and TensorFlow of this Python, keep the wheel in ~/.cache/unidist, and install it.

    The first build takes minutes, every later one for the same frameworks seconds.
    """
    try:
        target = find_target(cpu)
        install_horovod(target, wheel_dir)
        if not no_verify:
            verify_horovod(target)
    except UnidistError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error


def install_horovod(target: Target, wheel_dir: Path | None) -> None:
    """Obtain the wheel and install it, a line for each step; with nothing to do, a line that says so."""
    frameworks = ", ".join(f"{framework.name} {framework.version}" for framework in target.frameworks)
    say(f"horovod {VERSION}", f"{frameworks} | Python {platform.python_version()}, {target.machine}", transport(target))
    installed = horovod_build.is_installed(target)
    if wheel_dir or not installed:
        wheel = obtain_wheel(target, wheel_dir)
        if not installed:
            horovod_build.install_wheel(wheel)
    say("install", f"horovod {target.version}{', was there already' if installed else ''}")


def obtain_wheel(target: Target, wheel_dir: Path | None) -> Path:
    """The wheel, and a line that says whether it was there or how long its build took."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a build that is ended takes its compilers along
    start = time.monotonic()
    cached = horovod_build.find_wheel(target, horovod_build.cache_directory(target), wheel_dir)
    with progress() as report:
        wheel = horovod_build.obtain_wheel(
            target, report, wheel_dir, on_wait=lambda: say("build", "another process builds this wheel; waiting for it")
        )
    say("wheel", "built before" if cached else f"built in {clock(time.monotonic() - start)}", str(wheel))
    return wheel


def verify_horovod(target: Target) -> None:
    """Let two workers use what is installed, with each framework; a line for each."""
    for framework in target.frameworks:
        check = verify(framework.name)
        say("check", f"{framework.name}: two workers summed a tensor over {check.transport}, {check.seconds:.1f} s")


def transport(target: Target) -> str:
    """What the build communicates with, and why, where a GPU build could be expected."""
    if target.cuda:
        return f"CUDA {target.cuda} (NCCL)"
    if gpu_visible() and not any(framework.cuda for framework in target.frameworks):
        return "CPU (gloo), since the framework is a CPU build"
    return "CPU (gloo)"


@contextmanager
def progress() -> Iterator[horovod_build.Report]:
    """What a build reports to: a spinner on a terminal, elsewhere a line now and then."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda seconds, percent: status.update(progress_text(seconds, percent))
        return
    printed = 0

    def report(seconds: float, percent: int | None) -> None:
        nonlocal printed
        if seconds >= LINE_EVERY * printed:
            printed += 1
            say("build", progress_text(seconds, percent))

    yield report


def progress_text(seconds: float, percent: int | None) -> str:
    """Such as "compiling, 45 %, 2:03 (some 6 minutes on two idle cores)"; the last files count as 100 % when they begin."""
    step = {None: "preparing", 100: "compiling the last files"}.get(percent, f"compiling, {percent} %")
    return f"{step}, {clock(seconds)} (some 6 minutes on two idle cores)"


def clock(seconds: float) -> str:
    """Minutes and seconds as 2:03."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(label: str, *parts: str) -> None:
    """One line of output."""
    console.print(" | ".join([f"{label:<7}", *parts]), markup=False)
