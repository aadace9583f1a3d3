"""Writing a result to standard output in the form that was asked for."""

import json
import os
import shutil
import sys

import typer

from harness.cli.options import Format
from harness.errors import ExitStatus
from harness.results import CheckResult, Outcome

_STATUS = {
    Outcome.PASS: ExitStatus.PASS,
    Outcome.MISMATCH: ExitStatus.MISMATCH,
    Outcome.NOTHING: ExitStatus.NOTHING_CHECKED,
}


def print_result(result: CheckResult, form: Format) -> int:
    """Print the result and return the exit status that goes with it."""
    from harness.report.json import check_json  # noqa: PLC0415: each form loads only what it needs
    from harness.report.markdown import check_markdown  # noqa: PLC0415
    from harness.report.terminal import check_text  # noqa: PLC0415

    if form is Format.JSON:
        typer.echo(json.dumps(check_json(result), allow_nan=False, indent=1))
    elif form is Format.MARKDOWN:
        typer.echo(check_markdown(result))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        typer.echo(check_text(result, width=shutil.get_terminal_size((100, 24)).columns, color=color), color=color)
    return _STATUS[result.outcome]
