"""Write the tables of docs/explanations.md: `python docs/site/explanations.py`, or `make docs`.

The head of a table names files, or a folder, of explanations. Each of their explanations has a row, in the order in
which they are tried. A row has the section `Causes:` of the docstring, or its first paragraph if there is none.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.formats.taps import KINDS
from harness.judge.explain.causes import causes_of
from harness.judge.explain.core.wrong_operation import Explain

PAGE = Path(__file__).parents[1] / "explanations.md"
ROOMS = ("harness.judge.explain.", "harness.extensions.")
"""Packages that explanations are in; the names of files leave them out."""
_TABLE = re.compile(r"^\| function in (?P<files>.*) \| causes \|\n\|---\|---\|\n(?:\|.*\n)*", re.MULTILINE)


def file_of(explain: Explain) -> str:
    """Return the file of an explanation, relative to its room: `rotary/positions.py`."""
    room = next(room for room in ROOMS if explain.__module__.startswith(room))
    return explain.__module__.removeprefix(room).replace(".", "/") + ".py"


def causes_said_by(explain: Explain) -> str:
    """Return the causes that an explanation may give, as its docstring has them."""
    first, *others = inspect.getdoc(explain).split("\n\n")
    causes = next((part.removeprefix("Causes: ") for part in others if part.startswith("Causes: ")), first)
    text = " ".join(causes.split()).removesuffix(".")
    return text[0].upper() + text[1:]


def with_tables(page: str) -> str:
    """Return the page with all its tables written anew.

    Raises:
        ValueError: the file of an explanation is in no table.
    """
    explanations = list(dict.fromkeys(explain for kind in KINDS for explain in causes_of(kind)))
    written: set[Explain] = set()

    def rows(files: list[str]) -> Iterator[str]:
        for explain in explanations:
            if file_of(explain).startswith(tuple(files)):
                written.add(explain)
                yield f"| `{explain.__name__}` | {causes_said_by(explain)} |\n"

    def table(match: re.Match[str]) -> str:
        head = f"| function in {match['files']} | causes |\n|---|---|\n"
        return head + "".join(rows(re.findall(r"`([^`]+)`", match["files"])))

    page = _TABLE.sub(table, page)
    if missing := sorted({file_of(explain) for explain in explanations if explain not in written}):
        raise ValueError(f"no table is of {', '.join(missing)}")
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
