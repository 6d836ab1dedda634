"""A timeline as a grid: lines of characters for a terminal, and an SVG picture."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from unidist.pipeline.orders import BACKWARD, FORWARD, INPUT, WEIGHT
from unidist.pipeline.timeline import Span, Timeline

COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", INPUT: "#f58518", WEIGHT: "#54a24b"}
WORDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, inputs", WEIGHT: "backward, weights"}
_ROW, _COLUMN, _LEFT, _TOP = 28, 22, 84, 20


@dataclass(frozen=True)
class Cell:
    """`width` characters of a device's line; kind is None where it waits."""

    text: str
    kind: str | None
    width: int


def grid(timeline: Timeline) -> list[list[Cell]]:
    """For each device its cells from left to right; a micro-batch's number stands in each cell that computes."""
    unit = min(span.end - span.start for span in timeline.spans if span.end > span.start)
    digits = len(str(timeline.schedule.num_microbatches - 1)) + 1
    begin = min(span.start for span in timeline.spans)
    rows = []
    for device in range(timeline.schedule.num_devices):
        cells: list[Cell] = []
        column = 0
        for span in _of(timeline, device):
            start, end = (round((time - begin) / unit) for time in (span.start, span.end))
            if start > column:
                cells.append(Cell("", None, (start - column) * digits))
            cells.append(Cell(str(span.action.microbatch), span.action.kind, max(end - max(start, column), 1) * digits))
            column = max(end, column + 1)
        rows.append(cells)
    return rows


def svg(timeline: Timeline) -> str:
    """The picture as a document; times are to scale."""
    unit = min(span.end - span.start for span in timeline.spans if span.end > span.start)
    begin = min(span.start for span in timeline.spans)
    schedule = timeline.schedule
    width, height = _LEFT + timeline.length / unit * _COLUMN + 10, _TOP + schedule.num_devices * _ROW + 40
    kinds = [kind for kind in WORDS if any(span.action.kind == kind for span in timeline.spans)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="4" y="13">{escape(title(timeline))}</text>',
    ]
    for device in range(schedule.num_devices):
        y = _TOP + device * _ROW
        parts.append(f'<text x="4" y="{y + 18}">device {device}</text>')
        for span in _of(timeline, device):
            x, wide = _LEFT + (span.start - begin) / unit * _COLUMN, (span.end - span.start) / unit * _COLUMN
            shade = 1.0 - 0.35 * (span.action.stage // schedule.num_devices) / schedule.num_chunks
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" height="{_ROW - 4}" fill="{COLOURS[span.action.kind]}" '
                f'fill-opacity="{shade:.2f}" stroke="white"/>'
                f'<text x="{x + wide / 2:.1f}" y="{y + 18}" fill="white" text-anchor="middle">{span.action.microbatch}</text>'
            )
    y = _TOP + schedule.num_devices * _ROW + 12
    for position, kind in enumerate(kinds):
        x = _LEFT + position * 130
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/><text x="{x + 16}" y="{y + 10}">{WORDS[kind]}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def title(timeline: Timeline) -> str:
    """The schedule's name and sizes, and its bubble."""
    schedule = timeline.schedule
    chunks = f" of {schedule.num_chunks} stages" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_devices} devices{chunks}, {schedule.num_microbatches} micro-batches, "
        f"bubble {100 * timeline.bubble:.1f}% of the time"
    )


def _of(timeline: Timeline, device: int) -> list[Span]:
    return sorted((span for span in timeline.spans if span.device == device), key=lambda span: span.start)
