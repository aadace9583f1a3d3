"""A suite for people at a terminal: the counts, the matrix, and what did not pass."""

import textwrap
from collections.abc import Iterator

from harness.extensions.suite.report.matrix import MatrixCell, matrix_lines
from harness.extensions.suite.result import CaseResult, CaseVerdict, SuiteResult
from harness.report.check.sentences import number, printable
from harness.report.check.table import count
from harness.report.terminal import MIN_WIDTH, blocks_text

MOST_SHOWN = 20
"""Cases that did not pass; the JSON has all."""
_CELL_WIDTH = 28


def suite_text(result: SuiteResult, *, width: int) -> str:
    """Return a suite as lines; those of the list have at most `width` columns (80 at least)."""
    width = max(width, MIN_WIDTH)
    matrix = matrix_lines(result.cases, tablefmt="simple", name=printable, cell=_cell)
    return blocks_text([[headline(result)], matrix, _failed(result, width), _facts(result)])


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
    found = [("timings", f"{timings}; {count(result.num_workers, 'worker')}")]
    if result.num_resumed:
        found.append(("resumed", f"{count(result.num_resumed, 'case')} had ended before, and did not run again"))
    retried = sum(case.attempts > 1 for case in result.cases)
    if retried:
        found.append(("retried", f"{count(retried, 'case')} ran more than once, since a worker or a node was lost"))
    return [*found, *(("note", note) for note in result.notes)]


def _cell(cell: MatrixCell) -> str:
    lines = [cell.counts or "-"]
    if cell.failed and (first := cell.failed[0].first_divergence):
        lines.append(printable(str(first["tap"])).removeprefix("model.layers."))
    return "\n".join(line[:_CELL_WIDTH] for line in lines)


def _failed(result: SuiteResult, width: int) -> Iterator[str]:
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
