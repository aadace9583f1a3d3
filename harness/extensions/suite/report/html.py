"""A suite, and a suite over time, as one page each that needs no network."""

from pathlib import Path

from harness.extensions.suite.report.history import LEGEND, case_row, failing_first
from harness.extensions.suite.report.history import headline as headline_of_history
from harness.extensions.suite.report.matrix import matrix_of
from harness.extensions.suite.report.text import facts, headline
from harness.extensions.suite.result import CaseTrend, CaseVerdict, SuiteHistory, SuiteResult
from harness.report.templates import templates

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
    given = {"headline": headline_of_history(history), "legend": LEGEND, "runs": runs}
    cases = [_trend(history, trend) for trend in failing_first(history)]
    return templates(_TEMPLATES).get_template("history.html.j2").render(**given, cases=cases)


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
