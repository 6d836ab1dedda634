"""Every rule with the name of its test, as the tables of docs/contract.md; `python -m unidist.testing.listing docs/contract.md` writes them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from unidist.testing.table import CONTRACT, POINTS, registered_in

BEGIN, END = "<!-- rules of {} -->", "<!-- end of rules -->"
FIELD = "field_cases"


def tables(catalogue: str) -> str:
    """Markdown: for the contract a table for each point, for other catalogues one table by number."""
    rows: dict[int, list[str]] = {}
    for one in registered_in(catalogue):
        cases = f" ({len(one.cases)} cases)" if len(one.cases) > 1 else ""
        rows.setdefault(one.number, []).append(f"| `{one.number}-{one.name}` | {_sentence(one.title)}{cases} |")
    if catalogue != CONTRACT:
        return "\n".join(["| test | rule |", "|---|---|", *(row for number in sorted(rows) for row in rows[number])])
    parts = []
    for number in sorted(rows):
        parts += [f"**{number}. {POINTS[number][0].upper()}{POINTS[number][1:]}**", "", "| test | rule |", "|---|---|", *rows[number], ""]
    return "\n".join(parts).rstrip()


def _sentence(title: str) -> str:
    return title.replace("|", "\\|")


def replaced(text: str) -> str:
    """The document with its tables as they are now."""
    for catalogue in (CONTRACT, FIELD):
        begin = BEGIN.format(catalogue)
        if begin in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(END)
            text = f"{before}{begin}\n\n{tables(catalogue)}\n\n{END}{after}"
    return text


def main() -> None:
    """Bring the tables of the file that is named up to date."""
    path = Path(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "field"))
    importlib.import_module(FIELD)
    path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
