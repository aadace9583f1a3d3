"""Writing a result to standard output in the form that was asked for."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from harness.cli.options import ReportFormat
from harness.errors import Code, ExitStatus, HarnessError
from harness.results import Outcome

if TYPE_CHECKING:
    from harness.results import CheckResult

_STATUS = {
    Outcome.PASS: ExitStatus.PASS,
    Outcome.MISMATCH: ExitStatus.MISMATCH,
    Outcome.NOTHING: ExitStatus.NOTHING_CHECKED,
}


def print_result(result: "CheckResult", form: ReportFormat) -> int:
    """Print the result and return the exit status that goes with it."""
    from harness.report.json import check_json
    from harness.report.markdown import check_markdown
    from harness.report.terminal import check_text

    if form is ReportFormat.JSON:
        write_json(check_json(result))
    elif form is ReportFormat.MARKDOWN:
        write(check_markdown(result))
    else:
        has_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        write(check_text(result, width=shutil.get_terminal_size((100, 24)).columns, color=has_color))
    return _STATUS[result.outcome]


def print_results(results: "Sequence[CheckResult]", form: ReportFormat) -> int:
    """Print checks of several dtypes, side by side and then each; return the exit status of the worst."""
    from harness.report.dtypes import dtypes_json, dtypes_text, worst_outcome

    if len(results) == 1:
        return print_result(results[0], form)
    if form is ReportFormat.JSON:
        write_json(dtypes_json(results))
    else:
        write(dtypes_text(results, tablefmt="github" if form is ReportFormat.MARKDOWN else "simple") + "\n")
        for result in results:
            print_result(result, form)
    return _STATUS[worst_outcome(results)]


def write_json(document: Mapping[str, Any]) -> None:
    """Write a JSON document to standard output."""
    write(json.dumps(document, allow_nan=False, indent=1))


def write(text: str, *, end: str = "\n") -> None:
    """Write to standard output; a reader that went away (`harness check | head`) changes nothing about the result.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    try:
        typer.echo(text + end, nl=False)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the buffer's rest fails again at exit
        if not isinstance(error, BrokenPipeError):
            what = f"standard output cannot be written: {error.strerror}"
            raise HarnessError(Code.CANNOT_WRITE, what) from error
