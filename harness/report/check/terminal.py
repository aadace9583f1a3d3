"""The check for people at a terminal: verdict, first divergence, table, findings, facts; and what a check would cost.

A wider terminal shows more columns. Colour only repeats what the words say, so a log without colour loses nothing.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tabulate import tabulate

from harness.errors import Code, printable
from harness.report.check.sentences import (
    divergence_lines,
    extent,
    facts,
    finding_lines,
    seen_sentence,
    subject,
)
from harness.report.check.table import COLUMNS, LABEL, Column, Role, Row, Section, legend, sections
from harness.report.terminal import MIN_WIDTH, blocks_text, fitted_table
from harness.results.check import CheckCost, CheckResult, Divergence, Outcome

MIN_LABEL_WIDTH = 12
ARROW = "▸"
NO_BREAK = "\u00a0"

_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
_OUTCOMES = {Outcome.PASS: "green", Outcome.MISMATCH: "red", Outcome.NOTHING: "yellow"}


@dataclass(frozen=True, slots=True)
class _Page:
    """The properties of the output that the lines are laid out for."""

    width: int
    color: bool

    def paint(self, text: str, *styles: str) -> str:
        """Return `text` in colour, if colour is wanted."""
        if not self.color or not styles or not text:
            return text
        return f"\x1b[{';'.join(str(_STYLES[style]) for style in styles)}m{text}\x1b[0m"

    def wrap(self, label: str, text: str, *styles: str, indent: int) -> Iterator[str]:
        """Yield `text` wrapped after `label`; only the label has colour."""
        lines = [line.replace(NO_BREAK, " ") for line in textwrap.wrap(text, self.width - indent)] or [""]
        yield (self.paint(label, *styles) + " " * (indent - len(label)) + lines[0]).rstrip()
        yield from (" " * indent + line for line in lines[1:])


def check_text(result: CheckResult, *, width: int, color: bool) -> str:
    """Return a check as lines of at most `width` columns (80 at least), with ANSI colours where `color` is true."""
    page = _Page(max(width, MIN_WIDTH), color)
    blocks: list[Iterable[str]] = [_headline(result, page), _seen(result, page)]
    parts, key = sections(result), list(_legend(result, page))
    for part in parts:
        if len(parts) > 1:
            blocks.append(_title(part, page))
        if part.divergence:
            blocks.append(_divergence(part.divergence, page))
        rows = part.rows()
        if rows and (len(parts) == 1 or part.outcome is not Outcome.PASS):
            blocks += [_table(rows, page), key]
            key = []
    return blocks_text([*blocks, _findings(result, page), _facts(result, page)])


def _headline(result: CheckResult, page: _Page) -> Iterator[str]:
    word = result.outcome.upper()
    indent = len(word) + 2
    what = [_shortened(part, page.width - indent - 2) for part in subject(result)]
    *counts, schedules = extent(result)
    solid = [part.replace(" ", NO_BREAK) for part in (*what, *counts)]
    text = f"{NO_BREAK}· ".join([*solid, schedules])
    return page.wrap(word, text, "bold", _OUTCOMES[result.outcome], indent=indent)


def _seen(result: CheckResult, page: _Page) -> Iterator[str]:
    sentence = seen_sentence(result)
    if sentence is not None:
        yield from page.wrap("  seen", sentence, "dim", indent=15)


def _title(section: Section, page: _Page) -> Iterator[str]:
    words = {Outcome.PASS: "passes:", Outcome.MISMATCH: "differs:", Outcome.NOTHING: "empty:"}
    return page.wrap(words[section.outcome], printable(section.schedules), _OUTCOMES[section.outcome], indent=10)


def _divergence(divergence: Divergence, page: _Page) -> Iterator[str]:
    (first, tap), *rest = divergence_lines(divergence)
    for label, text in ((first, _shortened(tap, page.width - 19)), *rest):
        yield from page.wrap(label, text, "bold", "red", indent=18)


def _table(rows: Sequence[Row], page: _Page) -> list[str]:
    header, *lines = _laid_out(rows, page.width)
    verdict_at = header.index(COLUMNS[-1].header)
    rule = "  " + "─" * (max(map(len, (header, *lines))) - 2)
    body = [_painted(row, line, verdict_at, page) for row, line in zip(rows, lines, strict=True)]
    return [page.paint(header, "bold"), page.paint(rule, "dim"), *body]


def _laid_out(rows: Sequence[Row], width: int) -> list[str]:
    """Return the header and one line a row, with a gutter of two for the arrow, in at most `width` columns."""
    columns = list(COLUMNS)
    overflow = max(map(len, _tabulated(rows, columns))) - width
    while overflow > 0 and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
        overflow = max(map(len, _tabulated(rows, columns))) - width
    label_width = max(MIN_LABEL_WIDTH, max(len(row.label) for row in rows) - max(0, overflow))
    return [line[:width].rstrip() for line in _tabulated(rows, columns, label_width)]


def _tabulated(rows: Sequence[Row], columns: Sequence[Column], label_width: int = 1000) -> list[str]:
    """Return the lines of the table; the header is a row as any other, or tabulate pads it."""
    body = ([printable(column.cell(row)) for column in columns] for row in rows)
    cells = [[column.header for column in columns], *body]
    for line in cells:
        line[LABEL] = _shortened(line[LABEL], label_width)
    _hide_repeats(cells)
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=[column.align for column in columns])
    return [f"  {line}".rstrip() for line in text.splitlines()]


def _hide_repeats(cells: Sequence[list[str]]) -> None:
    """Leave the layer out if it is the one of the row above."""
    for above, below in reversed(list(pairwise(cells))):
        if above[0] == below[0]:
            below[0] = ""


def _painted(row: Row, line: str, verdict_at: int, page: _Page) -> str:
    if row.role is Role.CULPRIT:
        return page.paint(ARROW + line[1:], "bold", "red")
    if row.role is Role.DOWNSTREAM:
        return page.paint(line, "dim")
    return line[:verdict_at] + page.paint(line[verdict_at:], row.tap.verdict.color)


def _legend(result: CheckResult, page: _Page) -> Iterator[str]:
    has_downstream = any(row.role is Role.DOWNSTREAM for section in sections(result) for row in section.rows())
    for words, meaning in legend(printable(result.dtype), has_downstream=has_downstream):
        yield from (page.paint(line, "dim") for line in page.wrap(f"  {words}", meaning, indent=15))


def _findings(result: CheckResult, page: _Page) -> Iterator[str]:
    shown, rest = finding_lines(result)
    for code, sentence in shown:
        yield from page.wrap(f"  {code}", sentence, "yellow", indent=8)
    if rest:
        yield from page.wrap("", rest, indent=8)


def _facts(result: CheckResult, page: _Page) -> Iterator[str]:
    for label, sentence in facts(result):
        yield from page.wrap(f"  {label}", sentence, "dim", indent=15)


def _shortened(text: str, width: int) -> str:
    """Return `text` in at most `width` columns, without its middle if it is longer."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def cost_text(result: CheckCost, *, tablefmt: str = "simple") -> str:
    """Return a row for each phase, the disk and the memory; nothing in it is a verdict."""
    rows = [[phase.name, f"{phase.seconds:,.1f}", _gb(phase.read_bytes)] for phase in result.phases]
    rows.append(["all but the engine", f"{result.seconds:,.1f}", _gb(result.read_bytes)])
    table = fitted_table(rows, ["phase", "seconds", "GB read"], tablefmt=tablefmt)
    peak = "not known on this system" if result.peak_bytes is None else f"{_gb(result.peak_bytes)} GB"
    golden = "in the cache" if result.has_golden else "to be kept"
    requests = "1 request" if result.num_requests == 1 else f"{result.num_requests} requests"
    lines = [
        f"{Code.NOTHING_CHECKED}: nothing was checked: this is what a check would cost",
        f"{result.model} in {result.dtype}: {requests}, {result.num_tokens:,} tokens; measured on the first "
        f"{result.num_measured} of {result.num_layers} layers, the others taken by their parameters",
        "",
        table,
        "",
        f"engine   {result.num_engine_runs} runs, the last of them as served if the engine can; their time is its own",
        f"disk     {_gb(result.golden_bytes)} GB for the golden, {golden}; {_gb(result.recording_bytes)} GB for a "
        "recording while a schedule is judged",
        f"memory   {peak} at most beside mapped files and an engine in another process; "
        f"{_gb(result.available_bytes)} GB are free",
    ]
    return printable("\n".join(lines), keeps_lines=True)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f}"
