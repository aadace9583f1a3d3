"""`harness fuzz`: schedules that are searched, not listed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.grouped import grouped
from harness.cli.interrupts import INTERRUPTED
from harness.cli.output import STATUS
from harness.cli.progress import progress_bar
from harness.errors import Code, HarnessError
from harness.results.check import Outcome

if TYPE_CHECKING:
    from harness.campaigns.fuzz.run import FuzzOptions
    from harness.campaigns.fuzz.workload_file import WorkloadFile
    from harness.plan import Plan
    from harness.results.fuzz import FuzzResult
    from harness.results.invariance import InvarianceResult
    from harness.results.poison import PoisonResult


@grouped
def fuzz(
    given: Annotated[opt.Given, opt.CaseOptions("model", "engine", "engine_options", "dtype", "device", "truth")],
    seconds: Annotated[float, typer.Option(metavar="N", help="How long to search.")] = 60.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another one draws other workloads.")] = 0,
    first: Annotated[bool, typer.Option("--first", help="End at the first finding.")] = False,
    workload_seconds: Annotated[
        float, typer.Option(metavar="N", help="How long the engine may take for one workload.")
    ] = 60.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for files that repeat what was found.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Run the workload of such a file again, with all that it says, and no other."
        ),
    ] = None,
    invariance: Annotated[
        bool,
        typer.Option("--invariance", help="Find which changes of schedule alone change bits, in which operation."),
    ] = False,
    poison: Annotated[
        bool,
        typer.Option("--poison", help="Fill memory that no live row may depend on, and find what lets it in."),
    ] = False,
    fault: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Search with a known bug in the reference engine; `harness faults` has all."),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.FUZZ.option()] = "human",
) -> int:
    """Search workloads that an engine gets wrong.

    Prompts whose lengths lie about the boundaries of blocks and chunks, beginnings that are shared, arrivals, aborts,
    forks, and caches that are too small: each is judged as `harness check` judges. What fails is made as small as it
    can be. With --invariance the question is another: which change of schedule changes bits. With --poison: what
    depends on padding, free blocks, scratch memory or other requests.
    """
    _check_positive("--seconds", seconds)
    _check_positive("--workload-seconds", workload_seconds)
    if invariance and poison:
        raise HarnessError(Code.BAD_OPTION, "two questions at once", where="--poison", hint="leave --invariance out")
    two_runs = "--invariance" if invariance else "--poison" if poison else None
    if two_runs and (replay is not None or out is not None or first):
        what = "two runs are compared here, and nothing is searched, repeated or written"
        raise HarnessError(Code.BAD_OPTION, what, where=two_runs, hint="leave --replay, --out and --first out")
    if replay is not None and (given or fault is not None or out is not None):
        what = "a workload's file says what is to be run"
        raise HarnessError(Code.BAD_OPTION, what, where="--replay", hint="leave the other options out")
    with progress_bar() as report:
        from harness.campaigns.fuzz.run import (
            FuzzOptions,
            compare_schedules,
            poison_memory,
            run_again,
            search_workloads,
        )
        from harness.campaigns.fuzz.workload_file import load_workload
        from harness.judge.jobs.output_folder import new_output_dir

        options = FuzzOptions(seconds=seconds, seed=seed, workload_seconds=workload_seconds, is_first_enough=first)
        if two_runs:
            compare, form = (compare_schedules, forms.INVARIANCE) if invariance else (poison_memory, forms.POISON)
            form.chosen(format)
            with _opened(given, fault, options, local_files_only) as (plan, options):
                compared = compare(plan, options, progress=report)
            form.show(compared, format)
            return _status(compared)
        if replay is not None:
            file = load_workload(replay)
            with _opened(_said_by(file), file.fault, options, local_files_only) as (plan, options):
                result = run_again(plan, file.workload(), options, progress=report)
        else:
            with (
                nullcontext() if out is None else new_output_dir(out),
                _opened(given, fault, options, local_files_only) as (plan, options),
            ):
                result = search_workloads(plan, options, out=out, progress=report)
    forms.FUZZ.show(result, format)
    return _status(result)


def _said_by(file: "WorkloadFile") -> opt.Given:
    """Return what a workload's file says of the engine; a fault brings its own model."""
    names = ("model", "engine", "engine_options", "dtype", "device")
    return {name: getattr(file, name) for name in names} if file.fault is None else {}


@contextmanager
def _opened(
    given: opt.Given, fault: str | None, options: "FuzzOptions", local_files_only: bool
) -> "Iterator[tuple[Plan, FuzzOptions]]":
    """Yield the plan, and the options with the fault that is to be injected."""
    from harness.plan import plan_engine

    if fault is None:
        yield plan_engine(**given, local_files_only=local_files_only), options
        return
    from harness.selfcheck.faults.catalogue import choose
    from harness.selfcheck.faults.trial import checkpoint

    if given:
        what = "a fault comes with the engine, the model and the dtype that show it"
        raise HarnessError(Code.BAD_OPTION, what, where="--fault", hint="leave the other options out")
    (chosen,) = choose([fault])
    with checkpoint(chosen.setting) as folder:
        plan = plan_engine(model=str(folder), dtype=chosen.setting.dtype, local_files_only=local_files_only)
        plan = replace(plan, notes=(f"planted: {chosen.summary}",))
        yield plan, replace(options, planted=chosen.inject, fault=chosen.id)


def _check_positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        what = "the number of seconds must be positive"
        raise HarnessError(Code.BAD_OPTION, what, where=option, expected="above 0", actual=value, hint=f"{option} 60")


def _status(result: "FuzzResult | InvarianceResult | PoisonResult") -> int:
    """Return the exit status: what was found counts, also where the search was interrupted afterwards."""
    is_cut_short = result.was_interrupted and result.outcome is Outcome.NOTHING
    return INTERRUPTED if is_cut_short else STATUS[result.outcome]
