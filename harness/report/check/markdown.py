"""The check for a pull request: what the terminal shows, in GitHub's Markdown."""

import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlsplit

from tabulate import tabulate

from harness.errors import printable
from harness.report.check.sentences import (
    divergence_place,
    divergence_size,
    explanation_label,
    explanation_lines,
    extent,
    facts,
    finding_lines,
    seen_sentence,
    source_sentence,
    subject,
)
from harness.report.check.table import PAGE_COLUMNS, Role, Row, Section, legend, sections
from harness.results.check import CheckResult, Divergence, Outcome

_IN_A_TARGET = "/:?&=%#,;+@~-._"


def check_markdown(result: CheckResult) -> str:
    """Return a check as Markdown; names are escaped, and the table of a sound check is folded."""
    lines = [f"### {result.outcome}: {escaped(' · '.join(subject(result)))}", "", escaped(" · ".join(extent(result)))]
    if (sentence := seen_sentence(result)) is not None:
        lines += ["", f"Seen: {escaped(sentence)}"]
    parts = sections(result)
    for section in parts:
        lines += ["", *_section(section, printable(result.dtype), is_only=len(parts) == 1)]
    lines += ["", *_findings(result), ""]
    lines += [f"- {label}: {escaped(sentence)}" for label, sentence in facts(result)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def escaped(text: str) -> str:
    """Return `text` as Markdown that shows it literally, in a table cell too."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", printable(text))


def link(text: str, target: str) -> str:
    """Return a link to a file or a page, or the text alone where the target is neither: `javascript:`, for one."""
    if urlsplit(target).scheme not in ("", "http", "https"):
        return escaped(text)
    return f"[{escaped(text)}]({quote(target, safe=_IN_A_TARGET)})"


def fenced(text: str) -> str:
    """Return a text as a block of code, in a fence that the text cannot close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _section(section: Section, dtype: str, *, is_only: bool) -> Iterator[str]:
    if not is_only:
        yield f"**{section.outcome}**: {escaped(section.schedules)}"
        yield ""
    if section.divergence:
        yield _divergence(section.divergence)
        yield ""
        if section.divergence.explanation:
            explanation = section.divergence.explanation
            cause, *rest = map(escaped, explanation_lines(explanation))
            yield f"**{explanation_label(explanation)}: {cause}** ({'; '.join(rest)})"
            yield ""
    rows = section.rows()
    if rows:
        state = " open" if section.outcome is Outcome.MISMATCH else ""
        yield f"<details{state}><summary>Table by layer and operation</summary>"
        key = " ".join(f"{words}: {meaning}." for words, meaning in legend(dtype))
        yield from ("", *_table(rows), "", key, "", "</details>")


def _divergence(divergence: Divergence) -> str:
    tap = escaped(divergence.tap)
    place, size = escaped(divergence_place(divergence)), escaped(divergence_size(divergence))
    source = source_sentence(divergence)
    engine = f"; in the engine: {escaped(source)}" if source else ""
    return f"**First divergence: {tap}** at {place}: {size} ({divergence.code}){engine}"


def _table(rows: Sequence[Row]) -> list[str]:
    headers, alignments = zip(*((column.header, column.align) for column in PAGE_COLUMNS), strict=True)
    text = tabulate([_cells(row) for row in rows], headers, "pipe", disable_numparse=True, colalign=alignments)
    return text.splitlines()


def _cells(row: Row) -> list[str]:
    cells = [escaped(column.cell(row)) for column in PAGE_COLUMNS]
    if row.role is Role.CULPRIT:
        return [f"**{cell}**" if cell else "" for cell in cells]
    return cells


def _findings(result: CheckResult) -> Iterator[str]:
    shown, rest = finding_lines(result)
    for code, sentence in shown:
        yield f"- **{code}** {escaped(sentence)}"
    if rest:
        yield f"- {rest}"
