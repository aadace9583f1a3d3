"""`harness profile`: what prefill and decode cost, and where."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.grouped import grouped
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.case import ProfileSection

if TYPE_CHECKING:
    from harness.formats.checkpoint import Checkpoint
    from harness.oracle.requests import Prompt
    from harness.plan import Plan
    from harness.profiling.load import CaptureSchedule, ProfileWorkload

_DEFAULT = ProfileSection()


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options for the numbers of timed and traced steps."""

    wait: Annotated[int, typer.Option(metavar="N", help="Units (decode steps or runs) before the profiler starts.")] = 1
    warmup: Annotated[int, typer.Option(metavar="N", help="Units that run with the profiler, but are discarded.")] = 1
    active: Annotated[int, typer.Option(metavar="N", help="Maximum number of steps to capture per phase.")] = 8
    repeat: Annotated[int, typer.Option(metavar="N", help="Number of traces per phase.")] = 1
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Runs without a profiler, to measure latencies.")] = 5
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Same as --runs 2 --wait 0 --warmup 0 --active 2; takes about a third of the time."
        ),
    ] = False

    @property
    def num_runs(self) -> int:
        """Runs without a profiler."""
        return 2 if self.quick else self.runs

    def schedule(self) -> "CaptureSchedule":
        """Return which steps of a phase the profiler captures."""
        from harness.profiling.load import CaptureSchedule

        if self.quick:
            return CaptureSchedule(wait=0, warmup=0, active=2, repeat=self.repeat)
        return CaptureSchedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat)


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """Options for the number and length of requests."""

    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines file of requests, as in `harness server load`: prompt, prompt_token_ids or prompt_tokens; "
            "max_tokens.",
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Number of random tokens per prompt. [default: {_DEFAULT.prompt_tokens}]"),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Maximum number of tokens to generate per request. "
            f"[default: {_DEFAULT.max_new_tokens}, or as in the case or file]",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Number of requests that arrive together. [default: {_DEFAULT.batch_size}]"),
    ] = None

    def workload(self, plan: "Plan", *, has_prompts: bool) -> "ProfileWorkload":
        """Return the requests of the file, or those of the plan, or random ones if neither has any.

        Raises:
            HarnessError: BAD_OPTION: two options set prompts, or an option sets their size, or they have arrival times.
        """
        from harness.profiling.load import ProfileWorkload

        if self.requests is not None and has_prompts:
            what, hint = "the requests are given twice", "leave out --requests, or the prompts and the case"
            raise HarnessError(Code.BAD_OPTION, what, where="--requests", actual=self.requests, hint=hint)
        if self.requests is None and not has_prompts:
            return ProfileWorkload(
                batch_size=_DEFAULT.batch_size if self.batch_size is None else self.batch_size,
                num_prompt_tokens=_DEFAULT.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens,
                max_new_tokens=_DEFAULT.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            )
        for option, value in (("--prompt-tokens", self.prompt_tokens), ("--batch-size", self.batch_size)):
            if value is not None:
                what, hint = "the prompts that are given have sizes of their own", f"leave {option} out"
                raise HarnessError(Code.BAD_OPTION, what, where=option, actual=value, hint=hint)
        if self.requests is not None:
            return ProfileWorkload.of_prompts(self._file_prompts(self.requests, plan.checkpoint))
        return ProfileWorkload.of_prompts(
            [
                prompt if self.max_new_tokens is None else replace(prompt, max_new_tokens=self.max_new_tokens)
                for prompt in plan.prompts
            ]
        )

    def _file_prompts(self, path: Path, checkpoint: "Checkpoint") -> "list[Prompt]":
        from harness.oracle.request_file import Arrivals, read_requests
        from harness.plan import tokenize

        config = checkpoint.config
        limit = _DEFAULT.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        requests = read_requests(
            path,
            partial(tokenize, checkpoint=checkpoint, where=f"--requests {path}"),
            Arrivals(rate=math.inf),
            ids=range(config.get("text_config", config)["vocab_size"]),
            seed=0,
            max_tokens=lambda _rng: limit,
        )
        if late := max(request.at_s for request in requests):
            raise HarnessError(
                Code.BAD_OPTION,
                "a request of a profile cannot arrive later: every pass repeats the same steps, whatever they take",
                where=f"--requests {path}",
                expected="at: 0, or no at",
                actual=f"at: {late:g}",
                hint="leave at out: all then arrive at once; harness server load keeps the times, on a server",
            )
        return [request.prompt for request in requests]


@grouped
def profile(
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for report.html, traces and snapshots.")],
    *,
    fields: Annotated[
        opt.Fields,
        opt.CaseOptions("model", "engine", "engine_options", "dtype", "device", "lora", "requests", "case"),
    ],
    sizes: SizeOptions,
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="prefill, decode or mixed. Repeatable. [default: all phases of the engine]"),
    ] = None,
    capture: CaptureOptions,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.PROFILE.option()] = "human",
) -> int:
    """Profile prefill and decode of an engine.

    Runs the same steps four times: for latencies without a profiler, for a trace, for memory, and for exact counts. All
    requests arrive at once. Without prompts, the requests are random tokens.
    """
    with progress_bar() as report:
        from harness.judge.jobs.opened import new_output_dir
        from harness.plan import plan_engine, plan_request
        from harness.profiling.profile import ProfileSpec, keep_profile

        has_prompts = bool({"requests", "case"} & fields.keys())
        plan = (
            plan_request(**fields, schedules=["plain"], local_files_only=local_files_only)
            if has_prompts
            else plan_engine(**fields, local_files_only=local_files_only)
        )
        spec = ProfileSpec(
            plan=plan,
            workload=sizes.workload(plan, has_prompts=has_prompts),
            phases=tuple(phase or ()),
            schedule=capture.schedule(),
            num_runs=capture.num_runs,
        )
        with new_output_dir(out):
            result = keep_profile(spec, out, progress=report)
    forms.PROFILE.show(result, format)
    return ExitStatus.PASS
