"""`harness suite history`: the runs of a suite over time."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import forms
from harness.cli.output import refuse_existing
from harness.errors import ExitStatus


def history(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Folders of `harness suite --out`, or folders of such folders."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="HTML", help="New file for a page.")] = None,
    format: Annotated[str, forms.SUITE_HISTORY.option()] = "human",
) -> int:
    """Show since when cases fail, in which runs the engine's numbers changed, and what each check cost.

    The exit status is 1 where a case of the newest run does not pass. `harness suite bisect --history RUNS` looks for
    the commit.
    """
    from harness.base.files import write_text
    from harness.campaigns.suite.history import read_history
    from harness.report.suite.html import history_html

    refuse_existing(out)
    found = read_history(runs)
    if out is not None:
        write_text(out, history_html(found))
    forms.SUITE_HISTORY.show(found, format)
    is_failing = any(trend.first_failure is not None for trend in found.trends)
    return ExitStatus.MISMATCH if is_failing else ExitStatus.PASS
