"""A suite for a pull request, in GitHub's Markdown."""

from collections.abc import Iterator

from harness.extensions.suite.report.matrix import MatrixCell, matrix_lines
from harness.extensions.suite.report.text import MOST_SHOWN, facts, headline
from harness.extensions.suite.result import CaseVerdict, SuiteResult
from harness.report.check.markdown import escaped, link


def suite_markdown(result: SuiteResult) -> str:
    """Return a suite as Markdown: counts, matrix, and what did not pass, linked to its own report."""
    matrix = matrix_lines(result.cases, tablefmt="pipe", name=escaped, cell=_cell)
    lines = [f"### {escaped(headline(result))}", "", *matrix, "", *_failed(result), ""]
    lines += [f"- {label}: {escaped(sentence)}" for label, sentence in facts(result)]
    return "\n".join(lines) + "\n"


def _cell(cell: MatrixCell) -> str:
    if not cell.failed or not cell.failed[0].first_divergence:
        return cell.counts
    return f"{cell.counts}<br>{escaped(str(cell.failed[0].first_divergence['tap']))}"


def _failed(result: SuiteResult) -> Iterator[str]:
    failed = [case for case in result.cases if case.verdict is not CaseVerdict.PASS]
    for case in failed[:MOST_SHOWN]:
        name = link(case.name, case.report) if case.report else escaped(case.name)
        code = f" {escaped(case.code)}" if case.code else ""
        yield f"- **{case.verdict}{code}** {name}: {escaped(' '.join(case.divergence_text.split()))}"
    if len(failed) > MOST_SHOWN:
        yield f"- and {len(failed) - MOST_SHOWN} more"
