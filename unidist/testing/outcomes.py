"""What a check came to, on one rank and on all; the lines in which workers write it down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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


def merge(ranks: Sequence[dict[str, Outcome]], checks: Mapping[str, tuple[int, str]], why_ended: str) -> list[Outcome]:
    """One outcome per check (name to point and title): passed when all ranks passed; what was not reached failed."""
    return [_merge_one(Outcome(name, *known, PASSED), [rank.get(name) for rank in ranks], why_ended) for name, known in checks.items()]


def _merge_one(check: Outcome, rows: list[Outcome | None], why_ended: str) -> Outcome:
    known = [row for row in rows if row is not None]
    if not known:
        return replace(check, status=FAILED, message=f"not reached: {why_ended}")
    seconds = max(row.seconds for row in known)
    told = [f"rank {rank}: {_words(row, why_ended)}" for rank, row in enumerate(rows) if row is None or row.status in (FAILED, STARTED)]
    if told:
        return replace(check, status=FAILED, seconds=seconds, message="\n".join(told))
    if len({row.status for row in known}) > 1:
        return replace(check, status=FAILED, seconds=seconds, message=f"the ranks came to different ends: {[row.status for row in known]}")
    return replace(known[0], seconds=seconds)


def _words(row: Outcome | None, why_ended: str) -> str:
    if row is None:
        return f"not reached: {why_ended}"
    return f"ended inside this check: {why_ended}" if row.status == STARTED else row.message
