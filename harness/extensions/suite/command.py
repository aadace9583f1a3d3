"""`harness suite`: many checks as one, on this machine or on a cluster; what changed since."""

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from harness.command.forms import Forms
from harness.command.output import refuse_existing
from harness.command.strict import StrictCommand
from harness.errors import ExitStatus
from harness.extensions.suite.command_run import run

SUITE_DIFF = Forms(
    human="harness.extensions.suite.report.diff:diff_text", json="harness.extensions.suite.report.diff:diff_json"
)
SUITE_HISTORY = Forms(
    human="harness.extensions.suite.report.history:history_text",
    json="harness.extensions.suite.report.history:history_json",
    is_fenced=True,
)

_RUN = "run"


class _Group(typer.core.TyperGroup):
    """Takes `harness suite CASES...` for `harness suite run CASES...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="suite",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run many checks as one, here or on a Ray cluster: `harness suite CASES...` (docs/scale.md).",
)
app.command(_RUN, cls=StrictCommand)(run)


@app.command(cls=StrictCommand)
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="suite.json of before, or its folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="suite.json of now, or its folder.")],
    format: Annotated[str, SUITE_DIFF.option()] = "human",
) -> int:
    """Say what changed from one run of a suite to another.

    New failures, new passes, figures that moved beyond their noise, and slower cases. The exit status is 1 where a case
    fails that passed before or was not there, and 4 where cases have become slower and nothing else.
    """
    from harness.extensions.suite.diff import diff_suites
    from harness.extensions.suite.report.json import load_suite

    found = diff_suites(load_suite(old), load_suite(new))
    SUITE_DIFF.show(found, format)
    if found.new_failures or found.added_failures:
        return ExitStatus.MISMATCH
    return ExitStatus.REGRESSION if found.slower else ExitStatus.PASS


@app.command(cls=StrictCommand)
def history(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Folders of `harness suite --out`, or folders of such folders."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="HTML", help="New file for a page.")] = None,
    format: Annotated[str, SUITE_HISTORY.option()] = "human",
) -> int:
    """Show since when cases fail, in which runs the engine's numbers changed, and what each check cost.

    The exit status is 1 where a case of the newest run does not pass.
    """
    from harness.base.files import write_text
    from harness.extensions.suite.history import read_history
    from harness.extensions.suite.report.html import history_html

    refuse_existing(out)
    found = read_history(runs)
    if out is not None:
        write_text(out, history_html(found))
    SUITE_HISTORY.show(found, format)
    is_failing = any(trend.first_failure is not None for trend in found.trends)
    return ExitStatus.MISMATCH if is_failing else ExitStatus.PASS
