"""`harness suite`: many checks as one, on this machine or on a cluster; what changed since; who broke it."""

from typing import Any

import typer
import typer.core

from harness.cli.command import StrictCommand
from harness.cli.suite.bisect import bisect
from harness.cli.suite.diff import diff
from harness.cli.suite.history import history
from harness.cli.suite.run import run

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
app.command(cls=StrictCommand)(diff)
app.command(cls=StrictCommand)(history)
app.command(cls=StrictCommand)(bisect)
