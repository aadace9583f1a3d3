"""`harness diff`: compare two recordings."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.cli.output import print_result
from harness.cli.progress import progress_bar


def diff(
    expected: Annotated[Path, typer.Argument(help="A golden, or another engine's recording.")],
    actual: Annotated[Path, typer.Argument(help="The recording under test.")],
    model: opt.Model = None,
    taps: Annotated[
        list[str] | None,
        typer.Option("--taps", help="Glob of taps that must be recorded; may be given several times. [default: all]"),
    ] = None,
    require: Annotated[list[str] | None, typer.Option(help="Trigger that must be reached. [default: decode]")] = None,
    local_files_only: opt.LocalFilesOnly = True,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Compare two recordings row by row; with --model, judge every operation by replay as well.

    Without --model the rows are measured and judged against the golden's noise only.
    """
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        from harness.diff import run_diff  # noqa: PLC0415: seconds to import

        report("comparing", 0, 1)
        result = run_diff(
            expected,
            actual,
            model=model,
            taps=tuple(taps or ("*",)),
            require=tuple(require or ("decode",)),
            local_files_only=local_files_only,
        )
    return print_result(result, format)
