"""Findings where teams look: at lines of code in GitHub, in the summary of a job, in a file of SARIF for code scanning.

Source: OASIS, SARIF 2.1.0; GitHub, workflow commands for Actions.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import Code, printable
from harness.report.check.dtypes import DtypeChecks, checks_markdown
from harness.report.check.markdown import fenced
from harness.report.check.sentences import finding_sentence
from harness.report.gate import gate_text
from harness.results.check import Outcome
from harness.results.gate import GateResult, Quantity, TimeVerdict
from harness.version import __version__


@dataclass(frozen=True, slots=True)
class Annotation:
    """One finding, and the line of code that it is about, where that is known."""

    code: Code
    text: str
    file: str | None = None
    line: int | None = None


def _of_checks(checks: DtypeChecks) -> Iterator[Annotation]:
    """Yield what is wrong, each finding once; that nothing was checked is wrong too."""
    for result in checks.results:
        for finding in dict.fromkeys(finding for run in result.runs for finding in run.findings):
            source = result.sources.get(finding.tap or "")
            file, _, line = (source.code if source and source.code else "").rpartition(":")
            file = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file  # as a repository names it
            place = (file, int(line)) if file and line.isdecimal() else (None, None)
            text = f"{result.engine}, {result.model}, {result.dtype}: {finding_sentence(finding)}"
            yield Annotation(finding.code, printable(text), *place)
    if checks.outcome is Outcome.NOTHING:
        yield Annotation(Code.NOTHING_CHECKED, "nothing was checked, or not all that was asked for")


def _of_gate(result: GateResult) -> Iterator[Annotation]:
    for change in () if result.is_accepted else result.changes:
        where = f", in {', '.join(change.places[:3])}" if change.places else ""
        what = f"{change.phase} {change.operation or ''} {change.measure}: {change.before:,} -> {change.after:,}{where}"
        if change.is_regression:
            yield Annotation(Code.PERFORMANCE_REGRESSION, printable(what))
    if result.subjects.get(Quantity.TIME) == TimeVerdict.SLOWER:
        yield Annotation(Code.PERFORMANCE_REGRESSION, "a phase takes longer than in the version before")


def checks_github(checks: DtypeChecks) -> str:
    """Return a check as GitHub's workflow commands; add it to the summary of the job, if one runs."""
    return _github(_of_checks(checks), checks_markdown(checks))


def gate_github(result: GateResult) -> str:
    """Return a gate as GitHub's workflow commands; add it to the summary of the job, if one runs."""
    return _github(_of_gate(result), fenced(gate_text(result)) + "\n")


def _github(annotations: Iterator[Annotation], summary: str) -> str:
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(summary)
    lines = []
    for item in annotations:
        place = {"file": item.file, "line": item.line, "title": f"{item.code.value} {item.code.name}"}
        stated = ",".join(f"{key}={_escaped(str(value), ':,')}" for key, value in place.items() if value is not None)
        lines.append(f"::error {stated}::{_escaped(item.text)}")
    headline = summary.removeprefix("```text\n").lstrip("# ").partition("\n")[0]
    return "\n".join(lines or [f"::notice::{_escaped(headline)}"]) + "\n"


def _escaped(text: str, marks: str = "") -> str:
    return "".join(f"%{ord(mark):02X}" if mark in f"%\r\n{marks}" else mark for mark in text)


def checks_sarif(checks: DtypeChecks) -> dict[str, Any]:
    """Return a check as SARIF."""
    return _sarif(_of_checks(checks))


def gate_sarif(result: GateResult) -> dict[str, Any]:
    """Return a gate as SARIF."""
    return _sarif(_of_gate(result))


def _sarif(annotations: Iterator[Annotation]) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for item in annotations:
        place = {"artifactLocation": {"uri": item.file}, "region": {"startLine": item.line}}
        locations = [{"physicalLocation": place}] if item.file else []
        message = {"ruleId": item.code.value, "level": "error", "message": {"text": item.text}}
        results.append(message | {"locations": locations})
    rules = [{"id": code.value, "name": code.name} for code in Code if code.value in {row["ruleId"] for row in results}]
    driver = {"name": "inference-harness", "version": __version__, "rules": rules}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
