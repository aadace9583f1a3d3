"""`harness check`: the main job."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options as opt
from harness.cli.output import print_results
from harness.cli.progress import progress_bar
from harness.errors import Code, HarnessError

if TYPE_CHECKING:
    from harness.plan import Plan
    from harness.results import CheckResult


def check(
    model: opt.Model = None,
    engine: opt.EngineName = None,
    engine_option: opt.EngineOption = None,
    dtype: opt.Dtypes = None,
    device: opt.Device = None,
    prompt: opt.PromptText = None,
    prompt_file: opt.PromptFile = None,
    token_ids: opt.TokenIds = None,
    max_new_tokens: opt.MaxNewTokens = None,
    schedule: opt.ScheduleNames = None,
    case: opt.CaseFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for report.html and the engine's recordings."),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Check the reference engine with a known bug in it; `harness faults` has all."),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: opt.OutReportFormat = opt.ReportFormat.HUMAN,
) -> int:
    """Check an engine against HuggingFace.

    Every operation is compared row by row under every schedule. Without arguments: the reference engine on the
    embedded qwen3-tiny in float32, under the schedules plain, chunked and batched.
    """
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        from harness.check import run_check
        from harness.plan import resolve_dtype

        given = opt.Given(
            case=case,
            model=model,
            engine=engine,
            engine_options=engine_option,
            dtype=dtype[0] if dtype else None,
            device=device,
            prompts=prompt,
            prompt_file=prompt_file,
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            schedules=schedule,
        )
        with (
            nullcontext(given.plan(local_files_only=local_files_only))
            if fault is None
            else _broken(fault, given) as plan
        ):
            dtypes = list(dict.fromkeys(resolve_dtype(name, plan.folder) for name in dtype or []))
            if len(dtypes) < 2:
                results = [run_check(plan, out=out, progress=report)]
            else:
                plans = [replace(plan, dtype=name) for name in dtypes]
                results = [run_check(each, out=out and out / each.dtype, progress=report) for each in plans]
        if out is not None:
            _write_reports(results, out)
    return print_results(results, format)


def _write_reports(results: "Sequence[CheckResult]", out: Path) -> None:
    """Write the page of each check beside its recordings."""
    from harness.report.html import REPORT_NAME, report_html

    folders = [out] if len(results) == 1 else [out / result.dtype for result in results]
    for result, folder in zip(results, folders, strict=True):
        (folder / REPORT_NAME).write_text(report_html(result), encoding="utf-8")


@contextmanager
def _broken(fault: str, given: opt.Given) -> "Iterator[Plan]":
    """Put a fault into the reference engine, and yield the plan of a check that reaches it."""
    from harness.faults.catalogue import choose
    from harness.faults.trial import checkpoint, plan_of

    if given != opt.Given():
        what = "a fault comes with the model, the prompts and the schedule that show it"
        raise HarnessError(Code.BAD_OPTION, what, where="--fault", hint="leave the other options out")
    (chosen,) = choose([fault])
    with checkpoint(chosen.setting) as folder, chosen.plant():
        yield replace(plan_of(chosen.setting, folder), notes=(f"planted: {chosen.summary}",))
