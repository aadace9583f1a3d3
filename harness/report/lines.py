"""Parts of a text for a terminal: its first line, tables with a legend, facts beside their labels, blocks of these."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

from harness.report.check.sentences import printable
from harness.results.check import Outcome

MIN_WIDTH = 80
VERDICTS = {Outcome.PASS: "PASS", Outcome.MISMATCH: "MISMATCH", Outcome.NOTHING: "NOTHING CHECKED"}


def blocks_text(blocks: Iterable[Iterable[str]]) -> str:
    """Return blocks of lines with an empty line between them; a block without a line is left out."""
    return "\n\n".join(text for text in ("\n".join(block) for block in blocks) if text) + "\n"


def headline(word: str, *parts: str) -> str:
    """Return the first line: the verdict, and what was checked."""
    return f"{word}  {' · '.join(printable(part) for part in parts)}"


def table_lines(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str],
    align: Sequence[str] | None = None,
    *,
    legend: Sequence[str] = (),
) -> list[str]:
    """Return a table; one with a legend is indented, with the legend below it."""
    lines = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align).splitlines()
    if not legend:
        return lines
    return [*(f"  {line}".rstrip() for line in lines), "", *(f"  {line}" for line in legend)]


def wrapped(label: str, text: str, width: int, *, indent: int = 14) -> Iterator[str]:
    """Yield a label, and beside it a text in lines of at most `width` columns, which begins at column `indent`."""
    lines = textwrap.wrap(text, width - indent) or [""]
    yield f"{label:{indent}}{lines[0]}".rstrip()
    yield from (" " * indent + line for line in lines[1:])


def fact_lines(facts: Iterable[tuple[str, str]], width: int, *, indent: int = 14) -> Iterator[str]:
    """Yield each fact's label, and its sentence beside it."""
    for label, sentence in facts:
        yield from wrapped(f"  {label}", printable(sentence), width, indent=indent)
