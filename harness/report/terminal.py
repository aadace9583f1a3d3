"""Parts of a text for a terminal: first line, tables with a legend or of any width, facts; and a text in a notebook."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from tabulate import tabulate

from harness.errors import printable
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


def fitted_table(
    rows: Sequence[Sequence[object]],
    header: Sequence[str],
    *,
    width: int | None = None,
    dispensable: Sequence[str] = (),
    num_names: int = 1,
    tablefmt: str = "simple",
) -> str:
    """Return a table; columns that can be spared go until it fits.

    Args:
        rows: cells of each row.
        header: names of the columns.
        width: columns of the terminal; None: any width fits.
        dispensable: names of columns that may go, the first one first.
        num_names: columns of names, which come first; all others hold numbers.
        tablefmt: of tabulate's.
    """

    def tabulated() -> str:
        cells = [[row[column] for column in shown] for row in rows]
        align = ["left" if column < num_names else "right" for column in shown]
        return tabulate(cells, [header[at] for at in shown], tablefmt, disable_numparse=True, colalign=align)

    shown = list(range(len(header)))
    table = tabulated()
    for name in dispensable:
        if width is None or max(map(len, table.splitlines())) <= width:
            break
        if name in header:
            shown.remove(header.index(name))
            table = tabulated()
    return table


_WIDEST = 1000
_PRE = "<pre style=\"font-family: Menlo, 'DejaVu Sans Mono', Consolas, monospace; line-height: 1.2\">{code}</pre>"


class AnsiText:
    """A text with ANSI colours that is laid out for the width of rich's console; brackets in it are no markup."""

    def __init__(self, render: Callable[[int], str]) -> None:
        """Take a function from a width in columns to the text."""
        self._render = render

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.from_ansi(self._render(options.max_width).rstrip("\n"), no_wrap=True, overflow="ignore")


def pre_html(text: str) -> str:
    """Return a text with ANSI colours as one `<pre>` with styles of its own; nothing in it becomes markup."""
    console = Console(record=True, file=StringIO(), width=_WIDEST, color_system="standard", force_terminal=True)
    console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=_PRE)
