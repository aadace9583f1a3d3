"""`harness trace`: what is in a trace or memory snapshot of torch, and what changed between two."""

import re
from pathlib import Path
from typing import Annotated

import typer

from harness.base.files import write_text
from harness.command import forms
from harness.command.output import refuse_existing, write
from harness.command.strict import StrictCommand
from harness.errors import Code, ExitStatus, HarnessError

app = typer.Typer(
    name="trace", help="Read Chrome traces and memory snapshots of torch.", no_args_is_help=True, rich_markup_mode=None
)

_METAVAR = "a .json or .json.gz file written by torch.profiler, by this harness or another program."
_SNAPSHOT = (
    "a pickle of torch.cuda.memory._dump_snapshot or of `harness profile` (no code in it is run), or a trace of "
    "torch.profiler with profile_memory=True."
)

PhasePattern = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Regular expression for the names of step events; its first group is the phase. [default: annotations]",
    ),
]


def _compiled(pattern: str | None, option: str = "--phase-pattern") -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        what = f"the pattern is no regular expression: {error}"
        raise HarnessError(Code.BAD_OPTION, what, where=option, actual=pattern) from error


@app.command(cls=StrictCommand)
def summary(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help=f"Traces: {_METAVAR} For a folder, all traces in it.")
    ],
    phase_pattern: PhasePattern = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0.001, help="Peak TFLOP/s of the device; shows the share that matrix products reach."
        ),
    ] = None,
    format: Annotated[str, forms.TRACES.option()] = "human",
) -> int:
    """Summarize traces by phase and operator.

    The annotations of the steps name the phases, for example `decode[bs=1 toks=1 kv=128]`.
    """
    from harness.profiling.trace.file import trace_files
    from harness.profiling.trace.summary import summarize

    pattern = _compiled(phase_pattern)
    summaries = [summarize(file, pattern) for file in trace_files(files)]
    if pattern is not None and not any(summary.phases for summary in summaries):
        what, hint = "no event has a name that the pattern matches", "harness trace summary FILE lists the operators"
        raise HarnessError(Code.BAD_OPTION, what, where="--phase-pattern", actual=phase_pattern, hint=hint)
    forms.TRACES.show(summaries, format, peak_flops_per_s=None if peak_tflops is None else peak_tflops * 1e12)
    return ExitStatus.PASS


@app.command(cls=StrictCommand)
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Trace before: {_METAVAR}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Trace after.")],
    phase_pattern: PhasePattern = None,
    format: Annotated[str, forms.TRACE_DIFF.option()] = "human",
) -> int:
    """Tell what made the steps of a trace slower.

    Compares steps of like size: the time of a step, where it went, and operators, kernels, calls and Python functions
    that run more or less often in B than in A, or whose time differs.
    """
    from harness.profiling.trace.compare import diff_files

    forms.TRACE_DIFF.show(diff_files(before, after, _compiled(phase_pattern)), format)
    return ExitStatus.PASS


@app.command("critical-path", cls=StrictCommand)
def critical_path(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help=f"Traces: {_METAVAR} For a folder, all traces in it.")
    ],
    within: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Regular expression for the name of a step event. [default: the whole trace]"
        ),
    ] = None,
    instance: Annotated[
        int, typer.Option(metavar="N", help="Index of the step among those that match; -1 is the last one.")
    ] = 0,
    format: Annotated[str, forms.CRITICAL_PATHS.option()] = "human",
) -> int:
    """Show the critical path of a trace or step.

    The critical path is the chain of operators, launches and kernels that determines the duration.
    """
    from harness.base.memory import collecting_no_garbage
    from harness.profiling.trace.critical_path import critical_path
    from harness.profiling.trace.file import read_trace, trace_files

    pattern = _compiled(within, "--within")
    with collecting_no_garbage():
        paths = [
            critical_path(read_trace(file), str(file), within=pattern, instance=instance) for file in trace_files(files)
        ]
    forms.CRITICAL_PATHS.show(paths, format)
    return ExitStatus.PASS


@app.command(cls=StrictCommand)
def flame(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"Trace: {_METAVAR}")],
    out: Annotated[Path, typer.Option(metavar="HTML", help="New HTML file.")],
) -> int:
    """Write a flame graph of the CPU stacks.

    Record the trace with `with_stack=True` to see Python functions.
    """
    from harness.profiling.trace.nesting import flame
    from harness.report.trace import flame_html

    refuse_existing(out)
    write_text(out, flame_html(flame(file)))
    write(f"{out}")
    return ExitStatus.PASS


@app.command(cls=StrictCommand)
def memory(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=f"Snapshots: {_SNAPSHOT}")],
    out: Annotated[
        Path | None, typer.Option(metavar="HTML", help="New HTML file with the timeline of each allocation history.")
    ] = None,
    at: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Milliseconds after the first event; show what lives then as a tree of calls instead."
        ),
    ] = None,
    format: Annotated[str, forms.MEMORY.option()] = "human",
) -> int:
    """Summarize memory snapshots.

    Shows the memory in use, the peak, allocations that were not freed, and out-of-memory errors.
    """
    if at is not None:
        from harness.profiling.memory.tree import memory_at

        if out is not None:
            raise HarnessError(Code.BAD_OPTION, "a tree has no page", where="--out", hint="leave out --at or --out")
        forms.MEMORY_AT.show([moment for file in files for moment in memory_at(file, at)], format)
        return ExitStatus.PASS
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


@app.command("memory-diff", cls=StrictCommand)
def memory_diff(
    before: Annotated[Path, typer.Argument(metavar="A", help=f"Snapshot before: {_SNAPSHOT}")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Snapshot after.")],
    format: Annotated[str, forms.MEMORY_DIFF.option()] = "human",
) -> int:
    """Compare two memory snapshots.

    Shows the places in the code that hold more or less memory in B than in A, at the end and at the peak.
    """
    from harness.profiling.memory.summary import diff_memory

    forms.MEMORY_DIFF.show(diff_memory(before, after), format)
    return ExitStatus.PASS
