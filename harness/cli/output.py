"""Writing a result to standard output in the form that was asked for."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

import typer

from harness.cli.options import ReportFormat
from harness.errors import Code, ExitStatus, HarnessError
from harness.results.check import Outcome

if TYPE_CHECKING:
    from harness.results.check import CheckResult
    from harness.results.profile import ProfileResult

STATUS = {
    Outcome.PASS: ExitStatus.PASS,
    Outcome.MISMATCH: ExitStatus.MISMATCH,
    Outcome.NOTHING: ExitStatus.NOTHING_CHECKED,
}

_streams: list[IO[str]] = []
"""The streams that results are written to, the last one now; without any, `sys.stdout`."""


@contextmanager
def results_on(stream: IO[str]) -> Iterator[None]:
    """Have the results of the block written to a stream of their own: an engine may replace or close `sys.stdout`."""
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def print_result(result: "CheckResult", form: ReportFormat) -> int:
    """Print a check and return the exit status that goes with it."""
    return print_results([result], form)


def print_results(
    results: "Sequence[CheckResult]", form: ReportFormat, profiles: "Sequence[ProfileResult]" = ()
) -> int:
    """Print checks, those of several dtypes side by side first; return the exit status of the worst.

    Where there are profiles there is one for each check, and it stands after it.
    """
    from harness.report.check.dtypes import dtypes_json, dtypes_text
    from harness.results.check import Outcome

    if form is ReportFormat.JSON:
        documents = [_document(*pair) for pair in zip_longest(results, profiles)]
        write_json(documents[0] if len(results) == 1 else dtypes_json(results, documents))
    else:
        if len(results) > 1:
            write(dtypes_text(results, tablefmt="github" if form is ReportFormat.MARKDOWN else "simple") + "\n")
        for result, profile in zip_longest(results, profiles):
            _print_texts(result, profile, form)
    return STATUS[Outcome.of_all(result.outcome for result in results)]


def _document(result: "CheckResult", profile: "ProfileResult | None") -> dict[str, Any]:
    from harness.report.check.json import check_json
    from harness.report.profile.json import profile_json

    return check_json(result) | ({"profile": profile_json(profile)} if profile else {})


def _print_texts(result: "CheckResult", profile: "ProfileResult | None", form: ReportFormat) -> None:
    from harness.report.check.markdown import check_markdown, fenced
    from harness.report.check.terminal import check_text
    from harness.report.profile.text import profile_text

    if form is ReportFormat.MARKDOWN:
        write(check_markdown(result))
        if profile:
            write(fenced(profile_text(profile)))
        return
    has_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = terminal_width()
    write(check_text(result, width=width, color=has_color))
    if profile:
        write("\n" + profile_text(profile, width=width))


def terminal_width() -> int:
    """Return the columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


def write_json(document: Mapping[str, Any]) -> None:
    """Write a JSON document to standard output."""
    write(json.dumps(document, allow_nan=False, indent=1))


def write(text: str, *, end: str = "\n") -> None:
    """Write to standard output; a reader that went away (`harness check | head`) changes nothing about the result.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    stream = _streams[-1] if _streams else sys.stdout
    try:
        typer.echo(text + end, nl=False, file=stream)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the buffer's rest fails again at exit
        if not isinstance(error, BrokenPipeError):
            what = f"standard output cannot be written: {error.strerror}"
            raise HarnessError(Code.CANNOT_WRITE, what) from error
