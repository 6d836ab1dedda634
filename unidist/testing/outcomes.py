"""What a check came to, on one rank and on all; the lines in which workers write it down."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PASSED, FAILED, REFUSED, NOT_APPLICABLE, STARTED = "passed", "failed", "refused", "not_applicable", "started"


@dataclass(frozen=True)
class Outcome:
    """status: passed, failed, refused (as the backend declares) or not_applicable; message: why, or the traceback's end."""

    name: str
    point: int
    title: str
    status: str
    seconds: float = 0.0
    message: str = ""

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return self.status != FAILED


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its lines."""
    return folder / f"rank{rank}.jsonl"


def write(folder: Path, rank: int, outcome: Outcome) -> None:
    """Append a line; it is on the disk's way when this returns, so that a crash loses only what follows."""
    with path_of(folder, rank).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(folder: Path, rank: int) -> dict[str, Outcome]:
    """A rank's outcomes by name; one that was started and not ended has the status "started"."""
    path = path_of(folder, rank)
    if not path.exists():
        return {}
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    rows = [Outcome(**json.loads(line)) for line in whole]
    return {row.name: row for row in rows}


def merge(ranks: Sequence[dict[str, Outcome]], names: Iterable[str], why_ended: str) -> list[Outcome]:
    """One outcome per name, in order: passed when all ranks passed; what was not reached failed with `why_ended`."""
    return [_merge_one(name, [rank.get(name) for rank in ranks], why_ended) for name in names]


def _merge_one(name: str, rows: list[Outcome | None], why_ended: str) -> Outcome:
    known = [row for row in rows if row is not None]
    if not known:
        return Outcome(name, int(name.partition("-")[0]), name, FAILED, 0.0, f"not reached: {why_ended}")
    first = known[0]
    seconds = max(row.seconds for row in known)
    told = [f"rank {rank}: {_words(row, why_ended)}" for rank, row in enumerate(rows) if row is None or row.status in (FAILED, STARTED)]
    if told:
        return Outcome(name, first.point, first.title, FAILED, seconds, "\n".join(told))
    if len({row.status for row in known}) > 1:
        message = f"the ranks came to different ends: {[row.status for row in known]}"
        return Outcome(name, first.point, first.title, FAILED, seconds, message)
    return Outcome(name, first.point, first.title, first.status, seconds, first.message)


def _words(row: Outcome | None, why_ended: str) -> str:
    if row is None:
        return f"not reached: {why_ended}"
    return f"ended inside this check: {why_ended}" if row.status == STARTED else row.message
