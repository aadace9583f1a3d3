"""Writing a result to standard output in the form that was asked for."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import typer

from harness.errors import Code, ExitStatus, HarnessError
from harness.results.check import Outcome

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


def refuse_existing(out: Path | None) -> None:
    """Refuse to write over a file that is there.

    Raises:
        HarnessError: OUTPUT_EXISTS.
    """
    if out is not None and out.exists():
        raise HarnessError(Code.OUTPUT_EXISTS, "the output exists", where=out, hint="name a new file")


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
