"""`harness check`: the main job."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.endpoint import ServerOptions
from harness.cli.grouped import grouped
from harness.cli.output import STATUS
from harness.cli.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.base.progress import Progress
    from harness.plan import Plan
    from harness.results.check import CheckResult
    from harness.results.profile import ProfileResult


@grouped
def check(
    given: Annotated[opt.Given, opt.EVERY_OPTION],
    *,
    dtype: opt.Dtypes = None,
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
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Check nothing: say what the check would cost in time, disk and memory."),
    ] = False,
    server: ServerOptions,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.CHECKS.option()] = "human",
) -> int:
    """Check an engine against HuggingFace.

    Every operation is compared row by row under every schedule. Without arguments: the reference engine on the
    embedded qwen3-tiny in float32, under the schedules plain, chunked and batched.

    With --endpoint: a server, by the tokens and log probabilities that it gives; --dtype is then the server's.
    """
    if profile and out is None:
        what = "a profile needs a folder for its captures"
        raise HarnessError(Code.BAD_OPTION, what, where="--profile", hint="add --out DIR")
    if dtype:
        given["dtype"] = dtype[0]
    if estimate:
        refused: dict[str, object] = {
            "--out": out,
            "--fault": fault,
            "--profile": profile,
            "--endpoint": server.is_given,
        }
        refused["--dtype"] = (dtype or [])[1:]
        return _estimated(given, [name for name, value in refused.items() if value], local_files_only, format)
    with progress_bar() as report:
        if server.is_given:
            others = [out, fault, profile or None]
            return server.check(given, others, local_files_only, format, report)
        results, profiles = [], []
        with _planned(given, fault, local_files_only) as plan:
            for each, folder in _by_dtype(plan, dtype or [], out):
                results.append(_checked(each, folder, report))
                if profile and folder is not None:
                    profiles.append(_profiled(each, results[-1], folder, report))
    from harness.report.check.dtypes import DtypeChecks

    checks = DtypeChecks(results=results, profiles=profiles)
    forms.CHECKS.show(checks, format)
    return STATUS[checks.outcome]


def _estimated(given: opt.Given, others: Sequence[str], local_files_only: bool, format: str) -> int:
    """Show what a check of one dtype would cost; no status but that of nothing checked is right for it."""
    if others:
        what = "an estimate is of one check of an engine, and writes nothing"
        raise HarnessError(Code.BAD_OPTION, what, where=others[0], hint=f"leave {others[0]} or --estimate out")
    with progress_bar() as report:
        from harness.judge.jobs.estimate import run_estimate
        from harness.plan import plan_request

        cost = run_estimate(plan_request(**given, local_files_only=local_files_only), progress=report)
    forms.CHECK_COST.show(cost, format)
    return ExitStatus.NOTHING_CHECKED


@contextmanager
def _planned(given: opt.Given, fault: str | None, local_files_only: bool) -> "Iterator[Plan]":
    """Yield the plan of the check, with a fault in the reference engine where one is asked for."""
    if fault is None:
        from harness.plan import plan_request  # seconds to import

        yield plan_request(**given, local_files_only=local_files_only)
        return
    from harness.selfcheck.faults.catalogue import choose
    from harness.selfcheck.faults.trial import checkpoint, plan_of

    stops_early = given.pop("stops_early", False)
    if given:
        what = "a fault comes with the model, the prompts and the schedule that show it"
        raise HarnessError(Code.BAD_OPTION, what, where="--fault", hint="leave the other options out")
    (chosen,) = choose([fault])
    with checkpoint(chosen.setting) as folder, chosen.inject():
        plan = plan_of(chosen.setting, folder).changed(stops_early=stops_early)
        yield replace(plan, notes=(f"planted: {chosen.summary}",))


def _by_dtype(plan: "Plan", dtypes: Sequence[str], out: Path | None) -> "Iterator[tuple[Plan, Path | None]]":
    """Yield the plan for each dtype, and the folder of its results: of several dtypes each has one of its own."""
    from harness.plan import resolve_dtype

    names = list(dict.fromkeys(resolve_dtype(name, plan.checkpoint) for name in dtypes))
    if len(names) < 2:
        yield plan, out
        return
    for name in names:
        yield plan.changed(dtype=name), out and out / name


def _checked(plan: "Plan", folder: Path | None, report: "Progress") -> "CheckResult":
    """Run a check, and write its page if there is a folder for it."""
    from harness.judge.jobs.check import run_check
    from harness.judge.jobs.output_folder import keep_page

    result = run_check(plan, out=folder, progress=report)
    if folder is not None:
        keep_page(result, folder)
    return result


def _profiled(plan: "Plan", result: "CheckResult", folder: Path, report: "Progress") -> "ProfileResult":
    """Profile a check's engine, and write the page anew with both: what was known before is kept if this fails."""
    from harness.profiling.job import keep_profile, planned_profile

    return keep_profile(planned_profile(plan), folder, check=result, progress=report)
