"""A suite as one page that needs no network: the matrix, each cell with its first divergence and its report."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.report.check.sentences import printable
from harness.report.suite.matrix import matrix_of
from harness.report.suite.text import facts, headline
from harness.results.suite import CaseVerdict, SuiteResult

PAGE_NAME = "suite.html"
"""Name of the page in a suite's folder."""
_TEMPLATES = Path(__file__).parent / "template"


def suite_html(result: SuiteResult) -> str:
    """Return the page; its links hold where it lies in the suite's folder."""
    return (
        _environment()
        .get_template("suite.html.j2")
        .render(
            headline=headline(result),
            verdict=result.verdict.value,
            matrix=matrix_of(result.cases),
            failed=[case for case in result.cases if case.verdict is not CaseVerdict.PASS],
            facts=facts(result),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment
