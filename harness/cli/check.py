"""`harness check`: the main job."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options as opt
from harness.cli.endpoint import ServerOptions
from harness.cli.output import print_results
from harness.cli.progress import progress_bar
from harness.errors import Code, HarnessError

if TYPE_CHECKING:
    from harness.plan import Plan
    from harness.profile_results import ProfileResult
    from harness.progress import Progress
    from harness.results import CheckResult


def check(
    model: opt.Model = None,
    hf: opt.HFOrigin = None,
    engine: opt.EngineName = None,
    engine_option: opt.EngineOption = None,
    isolate: opt.Isolate = None,
    engine_timeout: opt.EngineTimeout = None,
    engine_python: opt.EnginePython = None,
    dtype: opt.Dtypes = None,
    device: opt.Device = None,
    truth: opt.TruthChoice = None,
    prompt: opt.PromptText = None,
    prompt_file: opt.PromptFile = None,
    token_ids: opt.TokenIds = None,
    max_new_tokens: opt.MaxNewTokens = None,
    schedule: opt.ScheduleNames = None,
    only: opt.Only = None,
    case: opt.CaseFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for report.html and the engine's recordings."),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Check the reference engine with a known bug in it; `harness faults` has all."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile the engine as well, into --out: see `harness profile`.")
    ] = False,
    stop_early: Annotated[
        bool,
        typer.Option("--stop-early", help="End at the first operation that is wrong, without looking for its cause."),
    ] = False,
    endpoint: opt.Endpoint = None,
    served_model: opt.ServedModel = None,
    concurrency: opt.Concurrency = None,
    request_timeout: opt.RequestTimeout = None,
    again: opt.Again = None,
    lora: opt.Lora = None,
    other_lora: opt.OtherLora = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: opt.OutReportFormat = opt.ReportFormat.HUMAN,
) -> int:
    """Check an engine against HuggingFace.

    Every operation is compared row by row under every schedule. Without arguments: the reference engine on the
    embedded qwen3-tiny in float32, under the schedules plain, chunked and batched.

    With --endpoint: a server, by the tokens and log probabilities that it gives; --dtype is then the server's.
    """
    server = ServerOptions(endpoint, served_model, concurrency, request_timeout, again)
    if profile and out is None:
        what = "a profile needs a folder for its captures"
        raise HarnessError(Code.BAD_OPTION, what, where="--profile", hint="add --out DIR")
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        from harness.jobs.check import keep_page, run_check
        from harness.plan import resolve_dtype

        given = opt.CliOptions(
            case=case,
            model=model,
            hf=hf,
            engine=engine,
            engine_options=engine_option,
            dtype=dtype[0] if dtype else None,
            device=device,
            truth=truth,
            prompts=prompt,
            prompt_file=prompt_file,
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            schedules=schedule,
            only=only,
            isolate=isolate,
            engine_timeout_s=engine_timeout,
            engine_python=engine_python,
            lora=lora,
            other_loras=other_lora or (),
        )
        if server.is_given:
            return server.check(
                given, [out, fault, profile or None, stop_early or None], local_files_only, format, report
            )
        with (
            nullcontext(given.plan(local_files_only=local_files_only))
            if fault is None
            else _broken(fault, given) as plan
        ):
            dtypes = list(dict.fromkeys(resolve_dtype(name, plan.folder) for name in dtype or []))
            plans = [replace(plan, dtype=name) for name in dtypes] if len(dtypes) > 1 else [plan]
            results, profiles = [], []
            for each in (replace(plan, stops_early=stop_early) for plan in plans):
                folder = out / each.dtype if out and len(plans) > 1 else out
                results.append(run_check(each, out=folder, progress=report))
                if folder is not None:
                    keep_page(results[-1], folder)
                    if profile:
                        profiles.append(_profiled(each, results[-1], folder, report))
    return print_results(results, format, profiles)


def _profiled(plan: "Plan", result: "CheckResult", folder: Path, report: "Progress") -> "ProfileResult":
    """Profile a check's engine, and write the page anew with both: what was known before is kept if this fails."""
    from harness.jobs.profile import keep_profile, planned_profile

    return keep_profile(planned_profile(plan), folder, check=result, progress=report)


@contextmanager
def _broken(fault: str, given: opt.CliOptions) -> "Iterator[Plan]":
    """Put a fault into the reference engine, and yield the plan of a check that reaches it."""
    from harness.faults.catalogue import choose
    from harness.faults.trial import checkpoint, plan_of

    if given != opt.CliOptions():
        what = "a fault comes with the model, the prompts and the schedule that show it"
        raise HarnessError(Code.BAD_OPTION, what, where="--fault", hint="leave the other options out")
    (chosen,) = choose([fault])
    with checkpoint(chosen.setting) as folder, chosen.inject():
        yield replace(plan_of(chosen.setting, folder), notes=(f"planted: {chosen.summary}",))
