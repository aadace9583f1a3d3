"""`harness profile`: what prefill and decode cost, and where."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.grouped import grouped
from harness.cli.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.case import ProfileSection

if TYPE_CHECKING:
    from harness.plan import Plan
    from harness.profiling.passes.load import CaptureSchedule
    from harness.profiling.passes.workload import ProfileWorkload

_DEFAULT = ProfileSection()


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


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """Options about how many requests are run, and how long they are."""

    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Tokens of each prompt; they are random. [default: {_DEFAULT.prompt_tokens}]"),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Tokens to generate for each request. [default: {_DEFAULT.max_new_tokens}, or the case's]",
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help=f"Requests that arrive together. [default: {_DEFAULT.batch_size}]")
    ] = None

    def workload(self, plan: "Plan | None") -> "ProfileWorkload":
        """Return the requests of a plan, or random ones where there is none.

        Raises:
            HarnessError: BAD_OPTION: sizes are given for prompts that have their own.
        """
        from harness.profiling.passes.workload import ProfileWorkload

        if plan is None:
            return ProfileWorkload(
                batch_size=_DEFAULT.batch_size if self.batch_size is None else self.batch_size,
                num_prompt_tokens=_DEFAULT.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens,
                max_new_tokens=_DEFAULT.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            )
        for option, value in (("--prompt-tokens", self.prompt_tokens), ("--batch-size", self.batch_size)):
            if value is not None:
                what, hint = "the prompts that are given have sizes of their own", f"leave {option} out"
                raise HarnessError(Code.BAD_OPTION, what, where=option, actual=value, hint=hint)
        longest = max(each.max_new_tokens for each in plan.prompts)
        return ProfileWorkload.of_prompts(
            [prompt.token_ids for prompt in plan.prompts],
            longest if self.max_new_tokens is None else self.max_new_tokens,
        )


@grouped
def profile(
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for report.html, traces and snapshots.")],
    *,
    given: Annotated[
        opt.Given, opt.CaseOptions("model", "engine", "engine_options", "dtype", "device", "lora", "requests", "case")
    ],
    sizes: SizeOptions,
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="prefill, decode or mixed. Repeatable. [default: all the engine has]"),
    ] = None,
    capture: CaptureOptions,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.PROFILE.option()] = "human",
) -> int:
    """Profile an engine, prefill and decode by themselves.

    Four passes over the same steps: times without a profiler, a trace, memory, and exact counts. Requests are random
    tokens, or prompts of your own, and all arrive at once. Without --model, the embedded qwen3-tiny.
    """
    with progress_bar() as report:
        from harness.judge.jobs.output_folder import new_output_dir
        from harness.plan import plan_engine, plan_request
        from harness.profiling.job import keep_profile
        from harness.profiling.profile import ProfileSpec

        has_prompts = bool({"requests", "case"} & given.keys())
        plan = (
            plan_request(**given, schedules=["plain"], local_files_only=local_files_only)
            if has_prompts
            else plan_engine(**given, local_files_only=local_files_only)
        )
        spec = ProfileSpec(
            plan=plan,
            workload=sizes.workload(plan if has_prompts else None),
            phases=tuple(phase or ()),
            schedule=capture.schedule(),
            num_runs=capture.num_runs,
        )
        with new_output_dir(out):
            result = keep_profile(spec, out, progress=report)
    forms.PROFILE.show(result, format)
    return ExitStatus.PASS
