"""`harness fuzz`: schedules that are searched, not listed."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.plugins import require_hypothesis
from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.grouped import grouped
from harness.command.interrupts import INTERRUPTED
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.command.strict import StrictCommand
from harness.errors import Code, HarnessError
from harness.results.check import Outcome

if TYPE_CHECKING:
    from harness.extensions.fuzz.files import WorkloadFile
    from harness.extensions.fuzz.result import FuzzResult, InvarianceResult, PoisonResult
    from harness.extensions.fuzz.run import FuzzOptions
    from harness.plan import Plan

FUZZ = Forms(human="harness.extensions.fuzz.report:fuzz_text", json="harness.extensions.fuzz.report:fuzz_json")
INVARIANCE = Forms(human="harness.extensions.fuzz.report:invariance_text", json=DOCUMENT)
POISON = Forms(human="harness.extensions.fuzz.report:poison_text", json=DOCUMENT)


app = typer.Typer(
    name="fuzz", no_args_is_help=True, rich_markup_mode=None, help="Search for workloads that an engine computes wrong."
)

EngineFields = Annotated[opt.Fields, opt.CaseOptions("model", "engine", "engine_options", "dtype", "device", "truth")]
_SECONDS, _SEED = 60.0, 0
Seconds = Annotated[float, typer.Option(metavar="N", help="Time limit of the search in seconds.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the workloads.")]
WorkloadSeconds = Annotated[float, typer.Option(metavar="N", help="Time limit of one workload in seconds.")]
FaultId = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Put this known bug into the reference engine; `harness faults` lists the bugs."),
]


@app.command("run", cls=StrictCommand)
@grouped
def run(
    fields: EngineFields,
    seconds: Seconds = _SECONDS,
    seed: Seed = _SEED,
    first: Annotated[bool, typer.Option("--first", help="Stop after the first finding.")] = False,
    workload_seconds: WorkloadSeconds = 60.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for workload files that reproduce the findings.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(metavar="FILE", help="Run the workload of such a file again.")] = None,
    fault: FaultId = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, FUZZ.option()] = "human",
) -> int:
    """Search for workloads that an engine computes wrong.

    Workloads vary prompt lengths near block and chunk boundaries, shared prefixes, arrivals, aborts, forks, and the
    size of the cache. Each workload is judged as in `harness check`. Failing workloads are minimized.
    """
    options = _options(seconds, seed, workload_seconds, first)
    searches = first or fault is not None or out is not None or (seconds, seed) != (_SECONDS, _SEED)
    if replay is not None and (fields or searches):
        what = "a workload's file says what is to be run"
        raise HarnessError(Code.BAD_OPTION, what, where="--replay", hint="leave the other options out")
    with progress_bar() as report:
        from harness.extensions.fuzz.files import load_workload
        from harness.extensions.fuzz.run import run_again, search_workloads
        from harness.judge.jobs.opened import new_output_dir

        if replay is not None:
            file = load_workload(replay)
            with _opened(_said_by(file), file.fault, options, local_files_only) as (plan, planned):
                result = run_again(plan, file.workload(), planned, progress=report)
        else:
            with (
                nullcontext() if out is None else new_output_dir(out),
                _opened(fields, fault, options, local_files_only) as (plan, planned),
            ):
                result = search_workloads(plan, planned, out=out, progress=report)
    FUZZ.show(result, format)
    return _status(result)


@app.command(cls=StrictCommand)
@grouped
def invariance(
    fields: EngineFields,
    seconds: Seconds = _SECONDS,
    seed: Seed = _SEED,
    workload_seconds: WorkloadSeconds = 60.0,
    fault: FaultId = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, INVARIANCE.option()] = "human",
) -> int:
    """Find operations that depend on the schedule.

    Changes one property of the schedule at a time, and compares the results bit by bit.
    """
    options = _options(seconds, seed, workload_seconds)
    with progress_bar() as report:
        from harness.extensions.fuzz.run import compare_schedules

        with _opened(fields, fault, options, local_files_only) as (plan, planned):
            result = compare_schedules(plan, planned, progress=report)
    INVARIANCE.show(result, format)
    return _status(result)


@app.command(cls=StrictCommand)
@grouped
def poison(
    fields: EngineFields,
    seconds: Seconds = _SECONDS,
    seed: Seed = _SEED,
    workload_seconds: WorkloadSeconds = 60.0,
    fault: FaultId = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, POISON.option()] = "human",
) -> int:
    """Find operations that read unused memory.

    Fills memory that no live row may depend on, and compares the results. That memory is padding, free blocks,
    uninitialized memory and the memory of other requests.
    """
    options = _options(seconds, seed, workload_seconds)
    with progress_bar() as report:
        from harness.extensions.fuzz.run import poison_memory

        with _opened(fields, fault, options, local_files_only) as (plan, planned):
            result = poison_memory(plan, planned, progress=report)
    POISON.show(result, format)
    return _status(result)


def _options(seconds: float, seed: int, workload_seconds: float, first: bool = False) -> "FuzzOptions":
    require_hypothesis("searching workloads", "harness fuzz")
    _check_positive("--seconds", seconds)
    _check_positive("--workload-seconds", workload_seconds)
    from harness.extensions.fuzz.run import FuzzOptions

    return FuzzOptions(seconds=seconds, seed=seed, workload_seconds=workload_seconds, is_first_enough=first)


def _said_by(file: "WorkloadFile") -> opt.Fields:
    """Return what a workload's file says of the engine; a fault brings its own model."""
    names = ("model", "engine", "engine_options", "dtype", "device")
    return {name: getattr(file, name) for name in names} if file.fault is None else {}


@contextmanager
def _opened(
    fields: opt.Fields, fault: str | None, options: "FuzzOptions", local_files_only: bool
) -> "Iterator[tuple[Plan, FuzzOptions]]":
    """Yield the plan, and the options with the fault that is to be injected."""
    from harness.plan import plan_engine

    if fault is None:
        yield plan_engine(**fields, local_files_only=local_files_only), options
        return
    from harness.extensions.faults.catalogue import choose
    from harness.extensions.faults.fault import EngineKind
    from harness.extensions.faults.subject import checkpoint

    if fields:
        what = "a fault comes with the engine, the model and the dtype that show it"
        raise HarnessError(Code.BAD_OPTION, what, where="--fault", hint="leave the other options out")
    (chosen,) = choose([fault], kinds=[EngineKind.REFERENCE])
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
