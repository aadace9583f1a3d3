"""`harness memory`: what is in a memory snapshot of torch, and what changed between two."""

from pathlib import Path
from typing import Annotated

import typer

from harness.base.files import write_text
from harness.cli import forms
from harness.cli.command import StrictCommand
from harness.cli.output import refuse_existing
from harness.errors import ExitStatus

app = typer.Typer(name="memory", help="Read memory snapshots of torch.", no_args_is_help=True, rich_markup_mode=None)

_METAVAR = (
    "a pickle of torch.cuda.memory._dump_snapshot or of `harness profile`, nothing in which is run; or a trace of "
    "torch.profiler with profile_memory=True."
)


@app.command(cls=StrictCommand)
def summary(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=f"Snapshots: {_METAVAR}")],
    out: Annotated[
        Path | None, typer.Option(metavar="HTML", help="New file for a page with the timeline of each history.")
    ] = None,
    format: Annotated[str, forms.MEMORY.option()] = "human",
) -> int:
    """Show what is in use, what was at the peak, what was allocated and kept, and what did not fit."""
    from harness.profiling.memory.summary import summarize_memory, summarize_with_timelines

    if out is None:
        forms.MEMORY.show([summarize_memory(file) for file in files], format)
        return ExitStatus.PASS
    from harness.report.page.html import memory_html

    refuse_existing(out)
    read = [summarize_with_timelines(file) for file in files]
    write_text(out, memory_html(read))
    forms.MEMORY.show([summary for summary, _ in read], format)
    return ExitStatus.PASS


@app.command(cls=StrictCommand)
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Snapshot before: {_METAVAR}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Snapshot after.")],
    format: Annotated[str, forms.MEMORY_DIFF.option()] = "human",
) -> int:
    """Show which places in the code hold more or less in B than in A, now and at the peak."""
    from harness.profiling.memory.summary import diff_memory

    forms.MEMORY_DIFF.show(diff_memory(before, after), format)
    return ExitStatus.PASS
