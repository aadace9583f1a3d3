"""`harness profile`: what prefill and decode cost, and where."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.grouped import grouped
from harness.cli.progress import progress_bar
from harness.errors import ExitStatus

if TYPE_CHECKING:
    from harness.profiling.passes.load import CaptureSchedule


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options about how much is timed and traced."""

    wait: Annotated[int, typer.Option(metavar="N", help="Units left alone before a capture: decode steps, runs.")] = 1
    warmup: Annotated[int, typer.Option(metavar="N", help="Units with the profiler on that are thrown away.")] = 1
    active: Annotated[int, typer.Option(metavar="N", help="Most steps of a phase that are captured.")] = 8
    repeat: Annotated[int, typer.Option(metavar="N", help="Traces of each phase.")] = 1
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs without a profiler, for the latencies.")] = 5
    quick: Annotated[
        bool, typer.Option("--quick", help="As --runs 2 --wait 0 --warmup 0 --active 2: about a third of the time.")
    ] = False

    @property
    def num_runs(self) -> int:
        """Runs without a profiler."""
        return 2 if self.quick else self.runs

    def schedule(self) -> "CaptureSchedule":
        """Return what is captured of a phase."""
        from harness.profiling.passes.load import CaptureSchedule

        if self.quick:
            return CaptureSchedule(wait=0, warmup=0, active=2, repeat=self.repeat)
        return CaptureSchedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)


@grouped
def profile(
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for report.html, traces and snapshots.")],
    *,
    given: Annotated[opt.Given, opt.CaseOptions("model", "engine", "engine_options", "dtype", "device")],
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each prompt; they are random.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate for each request.")] = 32,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Requests that arrive together.")] = 1,
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="prefill, decode or mixed. Repeatable. [default: all the engine has]"),
    ] = None,
    capture: CaptureOptions,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.PROFILE.option()] = "human",
) -> int:
    """Profile an engine, prefill and decode by themselves.

    Four passes over the same steps: times without a profiler, a trace, memory, and exact counts. Without --model, the
    embedded qwen3-tiny.
    """
    with progress_bar() as report:
        from harness.judge.jobs.output_folder import new_output_dir
        from harness.plan import plan_engine
        from harness.profiling.job import keep_profile
        from harness.profiling.passes.workload import ProfileWorkload
        from harness.profiling.profile import ProfileSpec

        spec = ProfileSpec(
            plan=plan_engine(**given, local_files_only=local_files_only),
            workload=ProfileWorkload(
                batch_size=batch_size, num_prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens
            ),
            phases=tuple(phase or ()),
            schedule=capture.schedule(),
            num_runs=capture.num_runs,
        )
        with new_output_dir(out):
            result = keep_profile(spec, out, progress=report)
    forms.PROFILE.show(result, format)
    return ExitStatus.PASS
