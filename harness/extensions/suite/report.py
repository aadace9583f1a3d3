"""A suite as text, Markdown, JUnit, JSON and a page that needs no network; and such JSON read back."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pydantic import TypeAdapter, ValidationError
from tabulate import tabulate

from harness.base.files import parse_json, read_text
from harness.errors import Code, HarnessError, printable
from harness.extensions.suite.history_report import LEGEND, case_row, failing_first
from harness.extensions.suite.history_report import history_headline as headline_of_history
from harness.extensions.suite.result import SEVERITY, CaseResult, CaseTrend, CaseVerdict, SuiteHistory, SuiteResult
from harness.report.check.markdown import escaped, link
from harness.report.check.table import count, number
from harness.report.document import plain
from harness.report.templates import templates
from harness.report.terminal import MIN_WIDTH, blocks_text


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """All cases of one model on one engine."""

    cases: tuple[CaseResult, ...]

    @property
    def verdict(self) -> CaseVerdict | None:
        """The worst; None if there is no case."""
        return max((case.verdict for case in self.cases), key=SEVERITY.index, default=None)

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Those that did not pass, the worst first."""
        failed = [case for case in self.cases if case.verdict is not CaseVerdict.PASS]
        return tuple(sorted(failed, key=lambda case: -SEVERITY.index(case.verdict)))

    @property
    def counts(self) -> str:
        """The count of each ending: `3 pass, 1 mismatch`."""
        counts = [(verdict, sum(case.verdict is verdict for case in self.cases)) for verdict in SEVERITY]
        return ", ".join(f"{number} {verdict}" for verdict, number in counts if number)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictMatrix:
    """Cells by model and engine."""

    models: tuple[str, ...]
    engines: tuple[str, ...]
    cells: tuple[tuple[MatrixCell, ...], ...]
    """[models][engines]"""


def matrix_of(cases: Sequence[CaseResult]) -> VerdictMatrix:
    """Put cases into their cells; models and engines stand in the order of the plan."""
    by_place: dict[tuple[str, str], list[CaseResult]] = {}
    for case in cases:
        by_place.setdefault((case.labels["model"], case.labels["engine"]), []).append(case)
    models = tuple(dict.fromkeys(model for model, _ in by_place))
    engines = tuple(dict.fromkeys(engine for _, engine in by_place))
    cells = [[MatrixCell(cases=tuple(by_place.get((model, engine), ()))) for engine in engines] for model in models]
    return VerdictMatrix(models=models, engines=engines, cells=tuple(map(tuple, cells)))


def matrix_lines(
    cases: Sequence[CaseResult], *, tablefmt: str, name: Callable[[str], str], cell: Callable[[MatrixCell], str]
) -> list[str]:
    """Return the table of a matrix; `name` and `cell` say how a name and a cell are written."""
    matrix = matrix_of(cases)
    rows = [[name(model), *map(cell, cells)] for model, cells in zip(matrix.models, matrix.cells, strict=True)]
    headers = ["model", *map(name, matrix.engines)]
    return tabulate(rows, headers, tablefmt=tablefmt, disable_numparse=True).splitlines()


MOST_SHOWN = 20
"""Cases that did not pass; the JSON has all."""
_CELL_WIDTH = 28


def suite_text(result: SuiteResult, *, width: int) -> str:
    """Return a suite as lines; those of the list have at most `width` columns (80 at least)."""
    width = max(width, MIN_WIDTH)
    matrix = matrix_lines(result.cases, tablefmt="simple", name=printable, cell=_text_cell)
    return blocks_text([[headline(result)], matrix, _text_of_failed(result, width), _facts(result)])


def headline(result: SuiteResult) -> str:
    """Return the verdict and the counts in a line."""
    counts = [f"{times} {verdict}" for verdict, times in result.counts.items()]
    return f"{result.verdict.upper()}  {' · '.join([count(len(result.cases), 'case'), *counts])}"


def facts(result: SuiteResult) -> list[tuple[str, str]]:
    """Return what else there is to know, as label and sentence."""
    busy = sum(case.seconds or 0.0 for case in result.cases)
    timings = f"all {number(result.elapsed_s)} s, checks together {number(busy)} s"
    if result.num_goldens:
        timings += f", {count(result.num_goldens, 'golden')} {number(result.golden_s)} s"
    sentences = [("timings", f"{timings}; {count(result.num_workers, 'worker')}")]
    if result.num_resumed:
        words = (
            f"{count(result.num_resumed, 'case')} had ended before, and did not run again: "
            "the files that Python opened are the same; environment variables, the time, files that were only listed "
            "or looked for, and those that a library or a process opened are not compared"
        )
        sentences.append(("resumed", words))
    retried = sum(case.attempts > 1 for case in result.cases)
    if retried:
        sentences.append(("retried", f"{count(retried, 'case')} ran more than once, since a worker or a node was lost"))
    return [*sentences, *(("note", note) for note in result.notes)]


def _text_cell(cell: MatrixCell) -> str:
    lines = [cell.counts or "-"]
    if cell.failed and (first := cell.failed[0].first_divergence):
        lines.append(printable(str(first["tap"])).removeprefix("model.layers."))
    return "\n".join(line[:_CELL_WIDTH] for line in lines)


def _text_of_failed(result: SuiteResult, width: int) -> Iterator[str]:
    failed = [case for case in result.cases if case.verdict is not CaseVerdict.PASS]
    for case in failed[:MOST_SHOWN]:
        yield f"{case.verdict:9}{printable(case.name)}"
        yield from textwrap.wrap(_why(case), width, initial_indent=" " * 9, subsequent_indent=" " * 9)
    if len(failed) > MOST_SHOWN:
        yield f"{'':9}and {len(failed) - MOST_SHOWN} more; --format json has all"


def _why(case: CaseResult) -> str:
    return printable(f"{case.code}: {case.divergence_text}" if case.code else case.divergence_text)


def _facts(result: SuiteResult) -> Iterator[str]:
    for label, sentence in facts(result):
        yield f"  {label:9}{printable(sentence)}"


def suite_markdown(result: SuiteResult) -> str:
    """Return a suite as Markdown: counts, matrix, and what did not pass, linked to its own report."""
    matrix = matrix_lines(result.cases, tablefmt="pipe", name=escaped, cell=_markdown_cell)
    lines = [f"### {escaped(headline(result))}", "", *matrix, "", *_markdown_of_failed(result), ""]
    lines += [f"- {label}: {escaped(sentence)}" for label, sentence in facts(result)]
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: MatrixCell) -> str:
    if not cell.failed or not cell.failed[0].first_divergence:
        return cell.counts
    return f"{cell.counts}<br>{escaped(str(cell.failed[0].first_divergence['tap']))}"


def _markdown_of_failed(result: SuiteResult) -> Iterator[str]:
    failed = [case for case in result.cases if case.verdict is not CaseVerdict.PASS]
    for case in failed[:MOST_SHOWN]:
        name = link(case.name, case.report) if case.report else escaped(case.name)
        code = f" {escaped(case.code)}" if case.code else ""
        yield f"- **{case.verdict}{code}** {name}: {escaped(' '.join(case.divergence_text.split()))}"
    if len(failed) > MOST_SHOWN:
        yield f"- and {len(failed) - MOST_SHOWN} more"


JUNIT_NAME = "junit.xml"
_ELEMENT = {CaseVerdict.MISMATCH: "failure", CaseVerdict.ERROR: "error", CaseVerdict.LOST: "error"}


def suite_junit(result: SuiteResult) -> str:
    """Return the XML; a mismatch is a failure, what was not checked is an error."""
    counts = result.counts
    suite = ElementTree.Element(
        "testsuite",
        name="harness suite",
        tests=str(len(result.cases)),
        failures=str(counts[CaseVerdict.MISMATCH]),
        errors=str(counts[CaseVerdict.ERROR] + counts[CaseVerdict.LOST]),
        time=f"{result.elapsed_s:.3f}",
    )
    for case in result.cases:
        _add(suite, case)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(suite: ElementTree.Element, case: CaseResult) -> None:
    place = f"{case.labels['model']}.{case.labels['engine']}"
    test = ElementTree.SubElement(
        suite, "testcase", classname=printable(place), name=printable(case.name), time=f"{case.seconds or 0.0:.3f}"
    )
    properties = ElementTree.SubElement(test, "properties")
    facts = {**case.labels, "verdict": case.verdict.value, "node": case.node, "report": case.report}
    for name, value in facts.items():
        if value is not None:
            ElementTree.SubElement(properties, "property", name=name, value=printable(str(value)))
    if case.verdict in _ELEMENT:
        message = printable(f"{case.code or case.verdict}: {case.divergence_text}")
        problem = ElementTree.SubElement(test, _ELEMENT[case.verdict], type=case.verdict.value, message=message)
        problem.text = printable(case.reason or "")


SCHEMA_VERSION = 1
SUITE_NAME = "suite.json"
"""Name of the document in a suite's folder."""
_CASES = TypeAdapter(tuple[CaseResult, ...])


def suite_json(result: SuiteResult) -> dict[str, Any]:
    """Return a suite as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(result)
    cases = document.pop("cases")
    head = {"schema_version": SCHEMA_VERSION, "verdict": result.verdict.value, "counts": result.counts}
    return {**head, "num_cases": len(cases), **document, "cases": cases}


def load_suite(path: Path) -> SuiteResult:
    """Read a suite's document, or that of a suite's folder.

    Raises:
        HarnessError: BAD_SUITE_RESULT.
    """
    file = path / SUITE_NAME if path.is_dir() else path
    try:
        document = parse_json(read_text(file))
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {document['schema_version']} is not known")
        cases = _CASES.validate_python(document["cases"])
        told = {name: document.get(name) for name in ("label", "begun_at")}
        if not all(value is None or isinstance(value, str) for value in told.values()):
            raise ValueError("label and begun_at are texts")
        return SuiteResult(cases=cases, elapsed_s=float(document["elapsed_s"]), **told)
    except (OSError, ValueError, KeyError, TypeError, ValidationError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HarnessError(
            Code.BAD_SUITE_RESULT,
            f"the file is no suite's result: {reason}",
            where=file,
            expected=f"{SUITE_NAME}, or the folder that `harness suite --out` made",
        ) from error


PAGE_NAME = "suite.html"
"""Name of the page in a suite's folder."""
_STEP = 8
"""Width of a run in the curve of a case's seconds."""
_TEMPLATES = Path(__file__).parent / "template"


def suite_html(result: SuiteResult) -> str:
    """Return the page; its links hold where it lies in the suite's folder."""
    return (
        templates(_TEMPLATES)
        .get_template("suite.html.j2")
        .render(
            headline=headline(result),
            verdict=result.verdict.value,
            matrix=matrix_of(result.cases),
            failed=[case for case in result.cases if case.verdict is not CaseVerdict.PASS],
            facts=facts(result),
        )
    )


def history_html(history: SuiteHistory) -> str:
    """Return the page of a suite over time: a row a case, those that fail since the latest run first."""
    runs = [{"name": history.label_of(at), "begun_at": run.begun_at} for at, run in enumerate(history.runs)]
    head = {"headline": headline_of_history(history), "legend": LEGEND, "runs": runs}
    cases = [_trend(history, trend) for trend in failing_first(history)]
    return templates(_TEMPLATES).get_template("history.html.j2").render(**head, cases=cases)


def _trend(history: SuiteHistory, trend: CaseTrend) -> dict[str, object]:
    name, shown, since, what, _, seconds = case_row(history, trend)
    verdicts = [result.verdict.value if result else None for result in trend.results]
    cells = [
        {"letter": letter, "verdict": verdict, "has_other_bits": at in trend.changed_bits}
        for at, (letter, verdict) in enumerate(zip(shown, verdicts, strict=True))
    ]
    known = [(at, result.seconds) for at, result in enumerate(trend.results) if result and result.seconds]
    top = max((value for _, value in known), default=0.0)
    curve = " ".join(f"{_STEP * at:d},{22 - 20 * value / top:.1f}" for at, value in known) if len(known) > 1 else ""
    facts = {"name": name, "since": since, "what": what, "seconds": seconds}
    return {**facts, "cells": cells, "curve": curve, "width": _STEP * len(trend.results)}
