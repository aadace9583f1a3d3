"""The folder that keeps a job's recordings and its page."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.base.files import scratch_folder, write_text
from harness.errors import Code, HarnessError
from harness.formats.recording.writer import is_unfinished
from harness.report.page.html import REPORT_NAME, report_html
from harness.results.check import CheckResult


def keep_page(result: CheckResult, folder: Path) -> None:
    """Write a check's page beside its recordings; raises HarnessError (CANNOT_WRITE)."""
    write_text(folder / REPORT_NAME, report_html(result))


@contextmanager
def recording_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Give the folder of one recording for the block: in `out`, or a scratch folder where that is None."""
    if out is not None:
        yield out / name
        return
    with scratch_folder("harness-") as folder:
        yield folder / name


@contextmanager
def new_output_dir(out: Path) -> Iterator[None]:
    """Make an output folder before the work that fills it; remove it again if the work fails and left nothing in it.

    Raises:
        HarnessError: OUTPUT_EXISTS, nothing that is there is overwritten; CANNOT_WRITE.
    """
    try:
        is_new = not out.exists()
        if not is_new and (not out.is_dir() or any(out.iterdir())):
            what = "the output folder exists and is not empty" if out.is_dir() else "the output path is a file"
            hint = "name a new folder"
            if any(is_unfinished(folder) for folder in (out, *out.glob("*/"))):
                hint = "it holds steps of a recording that was interrupted: remove it, or name a new folder"
            raise HarnessError(Code.OUTPUT_EXISTS, what, where=out, hint=hint)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the output folder cannot be made: {error.strerror}"
        raise HarnessError(Code.CANNOT_WRITE, what, where=out, hint="name another folder") from error
    if not os.access(out, os.W_OK):
        raise HarnessError(Code.CANNOT_WRITE, "the output folder is read-only", where=out, hint="name another folder")
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it is not empty: a recording of its own was finished in it
            if is_new:
                out.rmdir()
        raise
