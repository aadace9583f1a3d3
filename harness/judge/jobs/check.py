"""The main job: an engine's rows under every schedule against one golden, every operation by itself."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from harness.base.files import write_text
from harness.base.progress import Progress
from harness.base.scratch import scratch_folder
from harness.base.threads import limit_threads
from harness.engines import Capabilities, Engine, TapMatcher, engine_errors
from harness.engines.isolated import IsolatedEngine, isolated_engine
from harness.engines.record import RunDescription, record
from harness.errors import Code, HarnessError
from harness.formats.recording import ModelInfo, Recording, RequestInfo
from harness.formats.recording.writer import is_unfinished
from harness.formats.schedule import Schedule
from harness.formats.taps import Graph, Kind
from harness.judge.compare import Comparison, compare_run
from harness.judge.compare.compute import LEAST_JUDGED
from harness.judge.compare.propagated import what_logits_show
from harness.judge.explain import explain_run
from harness.judge.jobs.model import planned_model
from harness.oracle.forks import forked_prompts
from harness.oracle.golden import Golden
from harness.oracle.lora import adapter_notes
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import HFModel
from harness.oracle.requests import duplicate_requests
from harness.plan import Plan
from harness.report.page.html import REPORT_NAME, report_html
from harness.results.check import CheckResult, Outcome, RunResult


def run_check(plan: Plan, *, out: Path | None = None, progress: Progress | None = None) -> CheckResult:
    """Run the plan and return what was found.

    Args:
        plan: what to check.
        out: folder, new or empty, that keeps the recordings of the engine, one folder a schedule; None keeps nothing.
        progress: told what is being done.

    Raises:
        HarnessError: the input cannot be used. Findings are results, not errors.
    """
    with nullcontext() if out is None else new_output_dir(out):
        return _run_plan(plan, out, progress or (lambda _label, _done, _total: None))


def keep_page(result: CheckResult, folder: Path) -> None:
    """Write a check's page beside its recordings; raises HarnessError (CANNOT_WRITE)."""
    write_text(folder / REPORT_NAME, report_html(result))


def _run_plan(plan: Plan, out: Path | None, report: Progress) -> CheckResult:
    with open_planned(plan) as engine:  # before the golden, which may take long: what it cannot do is known at once
        return _check_engine(plan, engine, out, report)


def _check_engine(plan: Plan, engine: Engine | IsolatedEngine, out: Path | None, report: Progress) -> CheckResult:
    begin = time.perf_counter()
    report("oracle", 0, 1)
    hf = planned_model(plan)
    runs = []
    with limit_threads(int(getattr(hf.config, "hidden_size", 0))):
        match_taps(plan, engine, hf.graph)
        plan = followed_schedules(plan, engine)
        golden = cached_golden(hf, plan.prompts, truth=plan.case.truth, progress=report)
        golden_s = time.perf_counter() - begin
        for index, schedule in enumerate(plan.schedules):
            report(f"{plan.case.engine}, {schedule}", index, len(plan.schedules))
            runs.append(_run_schedule(plan, engine, schedule, golden, hf, out, report))
            if plan.case.stops_early and runs[-1].outcome is Outcome.MISMATCH:
                break
    report("done", len(plan.schedules), len(plan.schedules))
    return CheckResult(
        engine=plan.case.engine,
        model=plan.case.model,
        dtype=plan.case.dtype,
        device=plan.case.device,
        num_requests=len(plan.prompts),
        runs=tuple(runs),
        golden_s=golden_s,
        notes=(
            *plan.notes,
            *golden.notes,
            *adapter_notes(hf),
            *engine.capabilities.notes,
            *_what_was_judged(plan, runs, golden, hf.graph),
        ),
    )


def match_taps(plan: Plan, engine: Engine | IsolatedEngine, graph: Graph) -> None:
    """Let an engine whose taps depend on the model find them."""
    if isinstance(engine, TapMatcher):
        with engine_errors(plan.case.engine):
            engine.match_taps(graph)


def followed_schedules(plan: Plan, engine: Engine | IsolatedEngine) -> Plan:
    """Return the plan without the default schedules that the engine cannot follow.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it cannot follow one that was asked for.
    """
    offered = engine.capabilities.schedules
    others = [schedule for schedule in plan.schedules if schedule.name not in offered]
    if others and not plan.has_default_schedules:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"engine {plan.case.engine!r} cannot follow the schedule {others[0].name!r}",
            where="--schedule",
            expected=", ".join(offered),
            actual=str(others[0]),
            hint=f"--schedule {offered[0]}" if offered else None,
        )
    notes = [f"schedule {schedule} left out: engine {plan.case.engine} cannot follow it" for schedule in others]
    followed = [schedule for schedule in plan.schedules if schedule not in others]
    return replace(plan, schedules=tuple(followed), notes=(*plan.notes, *notes))


def _run_schedule(
    plan: Plan,
    engine: Engine | IsolatedEngine,
    schedule: Schedule,
    golden: Golden,
    hf: HFModel,
    out: Path | None,
    report: Progress,
) -> RunResult:
    golden, copies = with_duplicate_requests(plan, golden, schedule, hf)
    with _recording_folder(out, str(schedule).replace(":", "-")) as folder:
        begin = time.perf_counter()
        record_run(plan, engine, schedule, golden.requests[: len(plan.prompts)], folder, copies=copies)
        engine_s = time.perf_counter() - begin
        with Recording.open(folder, verify=False) as actual:  # written a moment ago by ourselves
            require = sorted({*schedule.requires, *plan.case.require})
            found = compare_planned(
                plan, engine.capabilities, actual, golden, hf, require=require, engine_s=engine_s, progress=report
            )
            return found.result if plan.case.stops_early else explain_run(found, actual, golden, hf)


def compare_planned(
    plan: Plan,
    capabilities: Capabilities,
    actual: Recording,
    golden: Golden,
    hf: HFModel,
    *,
    require: Sequence[str] = (),
    engine_s: float | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare what the plan's engine recorded with a golden, as far as the engine offers it and the plan asks for it.

    Args:
        plan: what was asked for.
        capabilities: of the engine, after its run.
        actual: what it recorded.
        golden: of its requests.
        hf: the model that judges every operation by itself.
        require: triggers that the run must have reached.
        engine_s: seconds the engine took, for the report.
        progress: told what is being done.
    """
    return compare_run(
        actual,
        golden,
        hf=hf,
        wanted=_wanted(plan, capabilities, hf.graph),
        not_offered=capabilities.all_unsupported_taps(),
        sampled_only=capabilities.sampled_only,
        accepts_tokens=plan.case.only == "tokens",
        least_compute=LEAST_JUDGED,
        require=require,
        truth=plan.case.truth,
        stops_early=plan.case.stops_early,
        engine_s=engine_s,
        progress=progress,
    )


def _wanted(plan: Plan, capabilities: Capabilities, graph: Graph) -> list[str]:
    """Return the taps that must have been recorded."""
    if plan.case.only in (None, "all"):
        return capabilities.wanted(graph)
    return preset_taps(plan.case.only, graph)


def preset_taps(preset: str, graph: Graph) -> list[str]:
    """Return the taps that a preset other than `all` asks for."""
    caches = [op.tap for op in graph if op.kind is Kind.CACHE]
    return {"cache": [*caches, graph.logits], "logits": [graph.logits], "tokens": []}[preset]


def _what_was_judged(plan: Plan, runs: Sequence[RunResult], golden: Golden, graph: Graph) -> Iterator[str]:
    """Say it if that is less than a reader of `pass` takes it for."""
    judged = {tap.name for run in runs for tap in run.taps if tap.judged_by != "none"}
    if plan.case.stops_early and any(run.outcome is Outcome.MISMATCH for run in runs):
        yield "stopped at the first operation that is wrong, as asked: what is after it was not judged"
    if plan.case.only == "cache" and 0 < len(judged) < len(graph):
        yield (
            f"{len(judged)} of {len(graph)} taps were judged, as asked: what is wrong elsewhere is seen only as far as "
            "it reaches the cache or the logits"
        )
    share = min((each for run in runs if (each := run.coverage.judged_compute) is not None), default=1.0)
    if share < LEAST_JUDGED and any(run.outcome is Outcome.NOTHING for run in runs):
        yield (
            f"{Code.NOTHING_CHECKED}: judged outputs are {100 * share:.0f} % of the model's multiply-adds, and a pass "
            f"needs {100 * LEAST_JUDGED:.0f} %: the engine declares the rest unsupported"
        )
    elif judged and judged <= {graph.logits, *graph.head}:
        yield f"only the logits were judged, which show {what_logits_show(golden.noise[graph.logits], graph)}"
    elif not judged and plan.case.only == "tokens":
        yield "only tokens were compared, as asked: not one operation was judged"
    elif not judged and any(run.tokens.compared for run in runs):
        code = Code.NOTHING_CHECKED
        yield f"{code}: no tap was recorded, so not one operation was judged; --taps tokens compares the tokens alone"


def with_duplicate_requests(
    plan: Plan, golden: Golden, schedule: Schedule, hf: HFModel
) -> tuple[Golden, Sequence[RequestInfo] | None]:
    """Return the golden that serves the schedule, and the copies of its requests.

    Forks go another way than what they are forked from, or it would not matter if they wrote over it. So their rows are
    in a larger golden.
    """
    if schedule.trigger != "forked":
        return golden, None
    larger = cached_golden(hf, [*plan.prompts, *forked_prompts(golden)], truth=plan.case.truth)
    return larger, larger.requests[len(plan.prompts) :]


@contextmanager
def open_planned(plan: Plan) -> Iterator[Engine | IsolatedEngine]:
    """Open the plan's engine for the block, and refuse it if it cannot follow a schedule that was asked for.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE; CHECKPOINT_CHANGED, if it was written again by the end of the block; as
            `open_engine` and `isolated_engine`.
    """
    with plan.checkpoint.unchanged(), _opened(plan) as engine:
        followed_schedules(plan, engine)
        yield engine


def _opened(plan: Plan) -> AbstractContextManager[Engine | IsolatedEngine]:
    if not plan.isolates_engine:
        return nullcontext(plan.open_engine())
    case = plan.case
    return isolated_engine(
        case.engine,
        plan.folder,
        dtype=case.dtype,
        device=case.device,
        options=plan.engine_options,
        timeout_s=case.engine_timeout_s,
        python=case.engine_python,
    )


def describe_run(
    plan: Plan,
    schedule: Schedule,
    requests: Sequence[RequestInfo],
    folder: Path,
    *,
    copies: Sequence[RequestInfo] = (),
) -> RunDescription:
    """Describe a run of the plan's engine, which is recorded into `folder`."""
    return RunDescription(
        engine=plan.case.engine,
        folder=folder.absolute(),
        model=ModelInfo(
            id=plan.case.model,
            revision=None,
            config_hash=plan.checkpoint.config_hash,
            weights_hash=plan.checkpoint.weights_hash,
        ),
        dtype=plan.case.dtype,
        device=plan.case.device,
        schedule=schedule,
        requests=list(requests),
        copies=list(copies),
    )


def record_run(
    plan: Plan,
    engine: Engine | IsolatedEngine,
    schedule: Schedule,
    requests: Sequence[RequestInfo],
    folder: Path,
    *,
    copies: Sequence[RequestInfo] | None = None,
) -> None:
    """Run the engine under one schedule and record it into `folder`.

    A repeated schedule's `copies` are by default the same requests once more.
    """
    if copies is None:
        copies = duplicate_requests(requests) if schedule.is_repeated else ()
    run = describe_run(plan, schedule, requests, folder, copies=copies)
    if isinstance(engine, IsolatedEngine):
        engine.record(run)
    else:
        record(engine, run)


@contextmanager
def _recording_folder(out: Path | None, name: str) -> Iterator[Path]:
    if out is not None:
        yield out / name
        return
    with scratch_folder("harness-") as folder:
        yield folder / name


@contextmanager
def new_output_dir(out: Path) -> Iterator[None]:
    """Make an output folder before the work that fills it; remove it again if the work fails and left nothing in it.

    Raises:
        HarnessError: OUTPUT_EXISTS, nothing that is there is overwritten; CANNOT_WRITE.
    """
    try:
        is_new = not out.exists()
        if not is_new and (not out.is_dir() or any(out.iterdir())):
            what = "the output folder exists and is not empty" if out.is_dir() else "the output path is a file"
            hint = "name a new folder"
            if any(is_unfinished(folder) for folder in (out, *out.glob("*/"))):
                hint = "it holds steps of a recording that was interrupted: remove it, or name a new folder"
            raise HarnessError(Code.OUTPUT_EXISTS, what, where=out, hint=hint)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the output folder cannot be made: {error.strerror}"
        raise HarnessError(Code.CANNOT_WRITE, what, where=out, hint="name another folder") from error
    if not os.access(out, os.W_OK):
        raise HarnessError(Code.CANNOT_WRITE, "the output folder is read-only", where=out, hint="name another folder")
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it is not empty: a recording of its own was finished in it
            if is_new:
                out.rmdir()
        raise
