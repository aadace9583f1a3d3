"""`harness check`: check an engine against HuggingFace."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.base.progress import Progress
    from harness.plan import Plan
    from harness.results.check import CheckResult


@grouped
def check(
    fields: Annotated[opt.Fields, opt.EVERY_OPTION],
    *,
    dtype: opt.Dtypes = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for report.html and the recordings of the engine."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate the time, disk space and memory of the check.")
    ] = False,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.CHECKS.option()] = "human",
) -> int:
    """Check an engine against HuggingFace.

    Compares every operation row by row under every schedule. By default, checks the reference engine with the embedded
    qwen3-tiny in float32, under the schedules plain, chunked and batched.
    """
    if dtype:
        fields["dtype"] = dtype[0]
    if dry_run:
        options = {"--out": out, "a second --dtype": (dtype or [])[1:]}
        return _estimated(fields, [name for name, value in options.items() if value], local_files_only, format)
    with progress_bar() as report:
        from harness.plan import plan_request  # seconds to import

        plan = plan_request(**fields, local_files_only=local_files_only)
        results = [checked(dtype_plan, folder, report) for dtype_plan, folder in _by_dtype(plan, dtype or [], out)]
    return show_checks(results, format)


def show_checks(results: "Sequence[CheckResult]", format: str) -> int:
    """Print the results of checks, and return the exit status."""
    from harness.report.check.dtypes import DtypeChecks

    checks = DtypeChecks(results=results)
    forms.CHECKS.show(checks, format)
    return STATUS[checks.outcome]


def _estimated(fields: opt.Fields, refused: Sequence[str], local_files_only: bool, format: str) -> int:
    """Show the estimated cost of a check of one dtype; the exit status is that of nothing checked."""
    if refused:
        what = "a dry run estimates one check, and writes nothing"
        raise HarnessError(Code.BAD_OPTION, what, where=refused[0], hint=f"leave {refused[0]} or --dry-run out")
    with progress_bar() as report:
        from harness.judge.jobs.estimate import run_estimate
        from harness.plan import plan_request

        cost = run_estimate(plan_request(**fields, local_files_only=local_files_only), progress=report)
    forms.CHECK_COST.show(cost, format)
    return ExitStatus.NOTHING_CHECKED


def _by_dtype(plan: "Plan", dtypes: Sequence[str], out: Path | None) -> "Iterator[tuple[Plan, Path | None]]":
    """Yield the plan for each dtype and the folder of its results; with several dtypes, each has a separate folder."""
    from harness.plan import resolve_dtype

    names = list(dict.fromkeys(resolve_dtype(name, plan.checkpoint) for name in dtypes))
    if len(names) < 2:
        yield plan, out
        return
    for name in names:
        yield plan.changed(dtype=name), out and out / name


def checked(plan: "Plan", folder: Path | None, report: "Progress") -> "CheckResult":
    """Run a check, and write its page if there is a folder for it."""
    from harness.judge.jobs.check import run_check
    from harness.judge.jobs.opened import keep_page

    begin = time.perf_counter() - time.process_time()  # its imports are most of a short check
    result = run_check(plan, out=folder, progress=report, begin=begin)
    if folder is not None:
        keep_page(result, folder)
    return result
