"""The page's view of a check, the verdict first."""

from typing import Any

from harness.report.check.columns import COLUMNS, LABEL, PAGE_COLUMNS, Column, legend
from harness.report.check.merge import merge_taps
from harness.report.check.sentences import (
    divergence_place,
    divergence_size,
    explanation_lines,
    extent,
    facts,
    finding_lines,
    printable,
    subject,
)
from harness.report.check.table import Section, sections
from harness.report.page.growth import growth_along_depth, growth_along_position
from harness.report.page.heat_map import heat_map
from harness.results.check import CheckResult, Outcome

View = dict[str, Any]
"""What a template is given, by name."""


def check_view(result: CheckResult) -> View:
    """Return what the template of a check is given."""
    findings, rest = finding_lines(result)
    return {
        "verdict": result.outcome.value,
        "sentence": _sentence(result),
        "subject": tuple(subject(result)),
        "extent": tuple(extent(result)),
        "sections": tuple(_section(section) for section in sections(result)),
        "findings": tuple(findings),
        "more_findings": rest,
        "facts": tuple(facts(result)),
        "dtype": printable(result.dtype),
        "columns": tuple((column.header, _style(column)) for column in PAGE_COLUMNS),
        "legend": " ".join(f"{words}: {meaning}." for words, meaning in legend(printable(result.dtype))),
    }


def _style(column: Column) -> str:
    if column is COLUMNS[LABEL]:
        return "code"
    return "number" if column.align == "right" else ""


def _sentence(result: CheckResult) -> str:
    """Return what came of the check, in a sentence."""
    divergence = result.first_divergence
    if divergence is not None:
        return f"The first operation that is wrong is {printable(divergence.tap)}, from {divergence_place(divergence)}."
    return {
        Outcome.PASS: "Every operation computes what HuggingFace computes, as well as rounding permits.",
        Outcome.MISMATCH: "No operation is out of bounds, but something expected differs or was not recorded.",
        Outcome.NOTHING: "Nothing was compared, so nothing is known.",
    }[result.outcome]


def _section(section: Section) -> View:
    run = section.runs[0]
    divergence = section.divergence
    return {
        "schedules": printable(section.schedules),
        "outcome": section.outcome.value,
        "culprit": _culprit(section),
        "heat": heat_map(merge_taps(section.runs), divergence.tap if divergence else None),
        "depth": growth_along_depth(run),
        "position": growth_along_position(run.positions, divergence.position if divergence else None),
        "lines": [
            {"cells": [printable(column.cell(row)) for column in PAGE_COLUMNS], "role": row.role.value}
            for row in section.rows()
        ],
    }


def _culprit(section: Section) -> View | None:
    divergence = section.divergence
    if divergence is None:
        return None
    cause, *details = explanation_lines(divergence.explanation) if divergence.explanation else (None,)
    return {
        "tap": printable(divergence.tap),
        "code": divergence.code.value,
        "place": divergence_place(divergence),
        "size": divergence_size(divergence),
        "cause": cause,
        "details": tuple(detail for detail in details if detail),
    }
