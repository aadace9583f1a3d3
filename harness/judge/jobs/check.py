"""The check: run an engine under every schedule, and judge its rows and operations against one golden.

The result of a failed check names the next place to look: the operation, its cause, and a narrower command.
"""

import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.base.progress import Progress
from harness.base.threads import limit_threads
from harness.engines import Capabilities, Engine
from harness.engines.record import IsolatedEngine
from harness.errors import Code
from harness.formats.case import Case
from harness.formats.recording import Recording
from harness.formats.schedule import Schedule, parse_schedule
from harness.formats.taps import Graph, Kind
from harness.judge.compare import Comparison, Requirements, compare_run
from harness.judge.compare.batch import RowSample
from harness.judge.compare.coverage import LEAST_JUDGED
from harness.judge.compare.propagated import what_logits_show
from harness.judge.compare.seen import SeenRows
from harness.judge.culprit import CULPRIT, SCRIPT, write_culprit
from harness.judge.explain import Budget, explain_run, power_of, wrong_operation
from harness.judge.jobs.opened import (
    followed_schedules,
    match_taps,
    new_output_dir,
    open_planned,
    planned_model,
    record_run,
    recording_folder,
    with_duplicate_requests,
)
from harness.judge.jobs.served import ended_before_served, with_served_run
from harness.judge.jobs.settings import compare_settings, with_settings
from harness.oracle.golden import Golden
from harness.oracle.lora import adapter_notes
from harness.oracle.make_golden import checked_golden, keep_graph, kept_graph, open_cached_golden
from harness.oracle.model import HFModel
from harness.oracle.requests import Prompt
from harness.oracle.untraced import parts_kept
from harness.plan import Plan
from harness.results.check import CheckResult, Divergence, Finding, NextPlace, Outcome, RunResult, TapSource

_POWER_SHARE = 0.1
"""Of the time of a check, what the search for mistakes that it would not have shown may take."""

_LEAST_FOR_SEEN = 4
"""Schedules from which on rows are looked up among those of earlier schedules: fewer share too few."""
_ROWS_OF_POWER = 48
"""Rows that are judged under the last schedule, though all were seen: the power of a pass is that of its rows."""


def run_check(
    plan: Plan, *, out: Path | None = None, progress: Progress | None = None, begin: float | None = None
) -> CheckResult:
    """Run the plan and return the result.

    Args:
        plan: what to check.
        out: new or empty folder for the recordings of the engine, one subfolder per schedule; None keeps nothing.
        progress: called with the current stage.
        begin: `time.perf_counter()` when the command began, if it did anything before; the search for mistakes that the
            check would not have shown may take a tenth of the time since then.

    Raises:
        HarnessError: the input cannot be used. Findings are results, not errors.
    """
    with nullcontext() if out is None else new_output_dir(out):
        return _run_plan(plan, out, progress or (lambda _label, _done, _total: None), begin or time.perf_counter())


def _run_plan(plan: Plan, out: Path | None, report: Progress, begin: float) -> CheckResult:
    deadline = math.inf if plan.case.budget_s is None else time.perf_counter() + plan.case.budget_s
    with open_planned(plan) as engine:  # before the golden, which may take long, because the engine may refuse the plan
        return _check_engine(plan, engine, out, report, deadline, begin)


def _check_engine(
    plan: Plan,
    engine: Engine | IsolatedEngine,
    out: Path | None,
    report: Progress,
    deadline: float,
    begin: float,
) -> CheckResult:
    report("oracle", 0, 1)
    hf = planned_model(plan)
    golden_begin = time.perf_counter()
    with limit_threads(int(getattr(hf.config, "hidden_size", 0))), parts_kept(hf):
        cached = open_cached_golden(hf, plan.prompts, truth=plan.case.truth)
        graph = kept_graph(hf) if cached is None else cached.graph
        if graph is not None:
            hf.graph = graph  # saves tracing the model again
        settings = compare_settings(plan, engine, hf)
        match_taps(plan, engine, hf.graph)
        plan = followed_schedules(plan, engine)
        golden = cached or checked_golden(hf, plan.prompts, truth=plan.case.truth, progress=report)
        if graph is None:
            keep_graph(hf)
        golden_s = time.perf_counter() - golden_begin
        results = _run_schedules(plan, engine, golden, hf, out, report, begin)
        described = (_with_source(with_settings(run, settings), engine.capabilities.sources) for run in results)
        runs = _until_stopped(plan, described, deadline)
    is_wrong = any(run.outcome is Outcome.MISMATCH for run in runs)
    not_run = () if is_wrong and plan.case.stops_early else tuple(map(str, plan.schedules[len(runs) :]))
    report("done", len(plan.schedules), len(plan.schedules))
    return CheckResult(
        engine=plan.case.engine,
        model=plan.case.model,
        dtype=plan.case.dtype,
        device=plan.case.device,
        num_requests=len(plan.prompts),
        runs=tuple(runs),
        golden_s=golden_s,
        sources=engine.capabilities.sources,
        seen=engine.capabilities.seen,
        notes=(
            *plan.notes,
            *golden.notes,
            *adapter_notes(hf),
            *engine.capabilities.notes,
            *_what_was_judged(plan, runs, golden, hf.graph),
            *_what_was_not_run(plan, not_run, engine.capabilities.schedules),
            *_where_the_culprit_is(out),
        ),
        schedules_not_run=not_run,
        next_place=next_place(plan, runs, engine.capabilities.sources),
    )


def _until_stopped(plan: Plan, runs: Iterator[RunResult], deadline: float) -> list[RunResult]:
    """Return the runs up to the time limit, or to the first wrong operation if the plan stops there."""
    kept = list[RunResult]()
    for run in runs:
        kept.append(run)
        if time.perf_counter() > deadline or (plan.case.stops_early and run.outcome is Outcome.MISMATCH):
            break
    kept[-1:] = [ended_before_served(run) if run.as_served is None else run for run in kept[-1:]]
    return kept


def _with_source(run: RunResult, sources: Mapping[str, TapSource]) -> RunResult:
    """Return a run whose first divergence names the engine's tensor."""
    first = run.first_divergence
    if first is None or first.tap not in sources:
        return run
    return replace(run, first_divergence=replace(first, source=sources[first.tap]))


def _run_schedules(
    plan: Plan,
    engine: Engine | IsolatedEngine,
    golden: Golden,
    hf: HFModel,
    out: Path | None,
    report: Progress,
    begin: float,
) -> Iterator[RunResult]:
    """Yield the result of each schedule; it runs when it is asked for."""
    edit_budget, seen = Budget(plan.case.explain_s), None if len(plan.schedules) < _LEAST_FOR_SEEN else SeenRows()
    for index, schedule in enumerate(plan.schedules):
        report(f"{plan.case.engine}, {schedule}", index, len(plan.schedules))
        is_last = index + 1 == len(plan.schedules)
        if seen is not None and is_last:
            seen.num_for_power = _ROWS_OF_POWER
        yield _run_schedule(plan, engine, schedule, golden, hf, out, report, begin, edit_budget, seen, serves=is_last)


def _run_schedule(
    plan: Plan,
    engine: Engine | IsolatedEngine,
    schedule: Schedule,
    golden: Golden,
    hf: HFModel,
    out: Path | None,
    report: Progress,
    check_begin: float,
    edit_budget: Budget,
    seen: SeenRows | None,
    *,
    serves: bool,
) -> RunResult:
    golden, copies = with_duplicate_requests(plan, golden, schedule, hf)
    with recording_folder(out, str(schedule).replace(":", "-")) as folder:
        begin = time.perf_counter()
        record_run(plan, engine, schedule, golden.requests[: len(plan.prompts)], folder, copies=copies)
        engine_s = time.perf_counter() - begin
        with Recording.open(folder, verify=False) as actual:  # this process just wrote it
            lacking = set() if engine.capabilities.has_decode else {"decode"}
            require = sorted({*schedule.requires, *plan.case.require} - lacking)
            comparison = compare_planned(
                plan, engine.capabilities, actual, golden, hf, require=require, progress=report, seen=seen
            )
            golden = comparison.expected
            result = comparison.result
            if not plan.case.stops_early:
                result = explain_run(comparison, actual, golden, hf, edit_budget)
            if out is not None:
                _keep_culprit(comparison, actual, golden, hf, out / CULPRIT)
            if serves:
                report(f"{plan.case.engine}, {schedule}, as served", 0, 1)
                result = with_served_run(result, plan, engine, schedule, actual, golden, hf, copies=copies)
            if serves and result.outcome is Outcome.PASS:
                report(f"{plan.case.engine}, {schedule}, power", 0, 1)
                budget_s = 0 if plan.case.stops_early else _POWER_SHARE * (time.perf_counter() - check_begin)
                result = replace(result, power=power_of(comparison, actual, golden, hf, budget_s=budget_s))
            return replace(result, engine_s=engine_s)


def _keep_culprit(comparison: Comparison, recording: Recording, golden: Golden, hf: HFModel, folder: Path) -> None:
    """Write the operation of the first divergence by itself, if no earlier schedule has one."""
    first = comparison.result.first_divergence
    if first is None or first.tap not in comparison.evidence or folder.exists():
        return
    with wrong_operation(comparison, recording, golden, hf, first.tap) as wrong:
        if wrong is not None:
            write_culprit(wrong, folder)


def compare_planned(
    plan: Plan,
    capabilities: Capabilities,
    actual: Recording,
    golden: Golden,
    hf: HFModel,
    *,
    require: Sequence[str] = (),
    progress: Progress | None = None,
    seen: SeenRows | None = None,
) -> Comparison:
    """Compare a recording of the engine with a golden, for the taps that the engine supports and the plan requires."""
    return compare_run(
        actual,
        golden,
        hf=hf,
        requirements=Requirements(
            wanted=_wanted(plan, capabilities, hf.graph),
            not_offered=capabilities.all_unsupported_taps(),
            sampled_only=capabilities.sampled_only,
            accepts_tokens=plan.case.only == "tokens",
            least_compute=LEAST_JUDGED,
            require=require,
        ),
        truth=plan.case.truth,
        stops_early=plan.case.stops_early,
        sample=planned_sample(plan),
        progress=progress,
        seen=seen,
    )


def planned_sample(plan: Plan) -> RowSample | None:
    """Return the sample of rows at which products and attention are judged; None for all rows."""
    return None if plan.case.rows is None else RowSample(num_rows=plan.case.rows, seed=plan.case.rows_seed)


def _wanted(plan: Plan, capabilities: Capabilities, graph: Graph) -> list[str]:
    """Return the taps that must have been recorded."""
    if plan.case.only in (None, "all"):
        return capabilities.wanted(graph)
    return preset_taps(plan.case.only, graph)


def preset_taps(preset: str, graph: Graph) -> list[str]:
    """Return the taps that a preset other than `all` asks for."""
    caches = [op.tap for op in graph if op.kind is Kind.CACHE]
    return {"cache": [*caches, graph.logits], "logits": [graph.logits], "tokens": []}[preset]


def _where_the_culprit_is(out: Path | None) -> Iterator[str]:
    if out is not None and (out / CULPRIT).exists():
        yield f"the first wrong operation by itself, without the harness: python {out / CULPRIT / SCRIPT}"


def _what_was_judged(plan: Plan, runs: Sequence[RunResult], golden: Golden, graph: Graph) -> Iterator[str]:
    """Yield notes on what was not judged, so that nobody reads too much into a pass."""
    judged = {tap.name for run in runs for tap in run.taps if tap.judged_by != "none"}
    if plan.case.stops_early and any(run.outcome is Outcome.MISMATCH for run in runs):
        yield "stopped at the first operation that is wrong, as asked: what is after it was not judged"
    if plan.case.only == "cache" and 0 < len(judged) < len(graph):
        yield (
            f"{len(judged)} of {len(graph)} taps were judged, as asked: what is wrong elsewhere is seen only as far as "
            "it reaches the cache or the logits"
        )
    if least_found := [run.coverage.least_rows_found for run in runs if run.coverage.least_rows_found]:
        yield (
            f"products and attention were judged in a sample of rows, as asked (--rows {plan.case.rows}, seed "
            f"{plan.case.rows_seed}): an error in {max(least_found)} rows of a request is judged in one of them with "
            "95 %; an error in fewer rows, where they stand out against HF's"
        )
    share = min((covered for run in runs if (covered := run.coverage.judged_compute) is not None), default=1.0)
    if share < LEAST_JUDGED and any(run.outcome is Outcome.NOTHING for run in runs):
        yield (
            f"{Code.NOTHING_CHECKED}: judged outputs are {100 * share:.0f} % of the model's multiply-adds, and a pass "
            f"needs {100 * LEAST_JUDGED:.0f} %: the engine does not show the rest"
        )
    elif judged and judged <= {graph.logits, *graph.head}:
        yield f"only the logits were judged, which show {what_logits_show(golden.truth.noise[graph.logits], graph)}"
    elif not judged and plan.case.only == "tokens":
        yield "only tokens were compared, as asked: not one operation was judged"
    elif not any(run.taps or run.findings for run in runs) and any(run.tokens.compared for run in runs):
        code = Code.NOTHING_CHECKED
        yield f"{code}: no tap was recorded, so not one operation was judged; --taps tokens compares the tokens alone"


def _what_was_not_run(plan: Plan, schedules: Sequence[str], offered: Sequence[str]) -> Iterator[str]:
    unasked = [name for name in offered if name not in {schedule.name for schedule in plan.schedules}]
    if unasked:
        yield f"schedules that the engine offers and that were not asked for: {', '.join(unasked)}"
    if schedules:
        yield (
            f"{Code.NOTHING_CHECKED}: the budget of {plan.case.budget_s:g} s was used up: not judged under "
            f"{', '.join(schedules)}"
        )


_REPEATED = (
    "model", "hf", "engine", "tensors", "names", "engine_options", "engine_timeout_s", "engine_python", "dtype",
    "device", "only", "mtp", "rows",
)  # fmt: skip
"""Fields of a case that the narrower check repeats as options. Its prompts and schedule differ, and it omits options
that end a check early. The command line cannot set the truth and the seed of the rows."""
_INSPECTED = ("model", "hf", "engine_options", "engine_python", "dtype", "device")
"""Fields of a case that the command to inspect the settings repeats, besides the engine."""


def next_place(plan: Plan, runs: Sequence[RunResult], sources: Mapping[str, TapSource]) -> NextPlace | None:
    """Return where to look next: the first divergence of the first run that failed, or its first finding."""
    run = next((run for run in runs if run.findings), None)
    if run is None:
        return None
    divergence: Divergence | Finding = run.first_divergence or run.findings[0]
    explanation = divergence.explanation
    is_setting = divergence.code is Code.SETTING_DIFFERS and isinstance(divergence, Finding)
    command = _inspection(plan) if is_setting else _narrower_check(plan, run, divergence.request)
    cause = explanation.cause if explanation is not None and explanation.is_cause else None
    source = None if divergence.tap is None else sources.get(divergence.tap)
    file, _, line = ("" if source is None else source.code or "").rpartition(":")
    return NextPlace(
        file=file or None,
        line=int(line) if file else None,
        tap=divergence.tap,
        cause=divergence.message if is_setting and isinstance(divergence, Finding) else cause,
        command=None if command is None or plan.subject is not None else shlex.join(["harness", *command]),
    )


def _inspection(plan: Plan) -> list[str]:
    return ["inspect", "--engine", plan.case.engine, *_options(plan.case, _INSPECTED)]


def _narrower_check(plan: Plan, run: RunResult, request: int | None) -> list[str] | None:
    """Return the command that checks one schedule, and one request if its rows do not depend on others.

    None if the command line cannot express the tokens.
    """
    schedule, prompts = parse_schedule(run.schedule), list(plan.prompts)
    if any(prompt.prompt_length is not None for prompt in prompts):
        return None
    is_alone = not schedule.is_batched and not schedule.is_repeated
    if is_alone and request is not None and request < len(prompts):
        prompts = [prompts[request]]
    return ["check", *_repeated(plan.case), "--schedule", str(schedule), *_fed(prompts)]


def _repeated(case: Case) -> Iterator[str]:
    """Yield the options of a check except its prompts and schedules."""
    yield from _options(case, _REPEATED)
    if case.isolate is False:
        yield from ("--engine-timeout", "0")
    for adapter in () if case.lora is None else (case.lora, *case.other_loras):
        yield from ("--lora", str(adapter))


def _fed(prompts: Sequence[Prompt]) -> Iterator[str]:
    for prompt in prompts:
        yield from ("--token-ids", ",".join(map(str, prompt.token_ids)))
    yield from ("--max-new-tokens", str(max(prompt.max_new_tokens for prompt in prompts)))


def _options(case: Case, names: Sequence[str]) -> Iterator[str]:
    """Yield the options of fields whose value is not the default."""
    for name in names:
        value: Any = getattr(case, name)
        option = Case.options()[name].name
        if value in (None, Case.model_fields[name].default):
            continue
        if value is True:
            yield option
            continue
        values = [f"{key}={entry}" for key, entry in value.items()] if isinstance(value, dict) else [value]
        for single in values:
            yield from (option, str(single))
