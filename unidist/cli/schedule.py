"""`unidist schedule`: which device of a pipeline does what when, its bubble and its activation memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from unidist.pipeline.drawing import COLOURS, WORDS, grid, svg, title
from unidist.pipeline.orders import ORDERS, make_schedule
from unidist.pipeline.timeline import Times, simulate


def schedule(
    stages: Annotated[int, typer.Option("--stages", min=1, help="Devices that the layers are split over.")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", min=1, help="Micro-batches of a step.")] = 8,
    name: Annotated[str, typer.Option("--schedule", help=f"One of {', '.join(ORDERS)}.")] = "1f1b",
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Stages on each device, with interleaved.")] = None,
    forward: Annotated[float, typer.Option("--forward", min=0.0, help="Time of a forward pass through a stage.")] = 1.0,
    backward: Annotated[float, typer.Option("--backward", min=0.0, help="Time of a backward pass through a stage.")] = 2.0,
    transfer: Annotated[float, typer.Option("--transfer", min=0.0, help="Time from one stage to the next.")] = 0.0,
    out: Annotated[Path | None, typer.Option("--out", help="Write the picture to this .svg file.")] = None,
) -> None:
    """Print a pipeline's schedule as a grid: a line per device, time to the right, the number of the micro-batch in each cell."""
    if not forward + backward > 0:
        raise typer.BadParameter("forward and backward passes take no time at all")
    if out is not None and out.suffix != ".svg":
        raise typer.BadParameter(f"the picture is an .svg file, not {out.name!r}", param_hint="--out")
    try:
        made = make_schedule(name, stages, microbatches, chunks or (2 if name == "interleaved" else 1))
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from error
    timeline = simulate(made, Times.even(made.num_stages, forward, backward, transfer))
    console = Console(highlight=False, soft_wrap=True)
    console.print(title(timeline))
    for device, cells in enumerate(grid(timeline)):
        line = Text(f"device {device:<3}")
        for cell in cells:
            style = f"white on {COLOURS[cell.kind]}" if cell.kind else ""
            line.append((f"{cell.kind}{cell.text}" if cell.kind else "").ljust(cell.width)[: cell.width], style)
        console.print(line)
    console.print(", ".join(f"{kind}: {WORDS[kind]}" for kind in dict.fromkeys(s.action.kind for s in timeline.spans)))
    peaks = ", ".join(f"device {device} {peak}" for device, peak in enumerate(timeline.peak_activations()))
    console.print(f"activations of micro-batches held at most: {peaks}")
    if out is not None:
        out.write_text(svg(timeline), encoding="utf-8")
        console.print(f"written to {out}")
