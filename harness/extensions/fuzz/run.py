"""`harness fuzz`: from a plan to what a search, or one workload run again, has found."""

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.progress import Progress
from harness.base.threads import limit_threads
from harness.engines import Capabilities, Engine
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.files import write_findings
from harness.extensions.fuzz.invariance import Comparer
from harness.extensions.fuzz.judge import WorkloadJudge
from harness.extensions.fuzz.poison import Poisoner
from harness.extensions.fuzz.result import FuzzResult, InvarianceResult, PoisonResult, SentWorkload
from harness.extensions.fuzz.search import Search
from harness.extensions.fuzz.strategies import SEARCHED, searched_schedules
from harness.extensions.fuzz.workload import SequencePool, Translator, make_pool
from harness.formats.schedule import ScheduleKind
from harness.judge.compare.triggers import Traits
from harness.judge.jobs.opened import match_taps, planned_model
from harness.oracle.golden import Golden
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import HFModel
from harness.oracle.untraced import frequencies_follow_length
from harness.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzOptions:
    """Options of a search."""

    seconds: float = 60.0
    """Of searching; what is made before, and shrinking the last finding, come on top."""
    seed: int = 0
    workload_seconds: float = 60.0
    """That the engine may take for one workload."""
    is_first_enough: bool = False
    """Whether the first finding ends the search."""
    planted: Callable[[], AbstractContextManager[object]] = nullcontext
    """Puts a known bug into the engine, anew for each workload."""
    fault: str | None = None
    """The bug's id, for the files."""


def search_workloads(
    plan: Plan, options: FuzzOptions, *, out: Path | None = None, progress: Progress | None = None
) -> FuzzResult:
    """Search workloads that the plan's engine gets wrong.

    The plan's prompts and schedules are not looked at. The folder `out` gets files that repeat the findings.

    Raises:
        HarnessError: the input cannot be used, or the engine serves no workload. Findings are results, not errors.
    """
    subject = _Subject.opened(plan, options, progress)
    with subject.threads():
        pool = subject.pool()
        judge = subject.judge(pool)
        golden_s = subject.elapsed_s()
        search = Search(
            judge=judge,
            translator=Translator(pool, judge.engine.capabilities.control, plan.engine_options),
            seconds=options.seconds,
            seed=options.seed,
            is_first_enough=options.is_first_enough,
            began=subject.began,
            progress=subject.report,
        )
        search.run()
        _refuse_nothing(plan, search)
        findings = search.all_findings()
        if out is not None:
            findings = write_findings(findings, plan, out, planted=options.planted, fault=options.fault)
    return FuzzResult(
        **subject.described(),
        findings=findings,
        golden_s=golden_s,
        num_workloads=search.num_workloads,
        num_rows=search.num_rows,
        rejected=dict(search.rejected),
        coverage=dict(search.coverage),
        was_interrupted=search.was_interrupted,
        unreached=_unreached(judge.engine.capabilities, search.coverage),
    )


def compare_schedules(plan: Plan, options: FuzzOptions, *, progress: Progress | None = None) -> InvarianceResult:
    """Find which changes of schedule change the bits of the plan's engine.

    The plan's prompts and schedules are not looked at.

    Raises:
        HarnessError: the input cannot be used.
    """
    subject = _Subject.opened(plan, options, progress)
    with subject.threads(), options.planted():
        pool = subject.pool()
        comparer = Comparer(
            plan=plan,
            engine=subject.engine,
            hf=subject.hf,
            golden=subject.golden(pool),
            pool=pool,
            progress=subject.report,
            limit_s=options.workload_seconds,
        )
        was_interrupted = comparer.run(options.seconds, options.seed)
    return InvarianceResult(
        **subject.described(),
        num_rounds=comparer.num_rounds,
        changes=comparer.changes(),
        was_interrupted=was_interrupted,
    )


def poison_memory(plan: Plan, options: FuzzOptions, *, progress: Progress | None = None) -> PoisonResult:
    """Fill memory that no live row may depend on, and find the operations of the plan's engine that let it in.

    The plan's prompts and schedules are not looked at.

    Raises:
        HarnessError: the input cannot be used; RUNS_DIFFER: the engine's bits are others in each run.
    """
    subject = _Subject.opened(plan, options, progress)
    with subject.threads():
        match_taps(plan, subject.engine, subject.hf.graph)
        poisoner = Poisoner(
            plan=plan,
            engine=subject.engine,
            graph=subject.hf.graph,
            pool=subject.pool(),
            progress=subject.report,
            limit_s=options.workload_seconds,
            planted=options.planted,
        )
        was_interrupted = poisoner.run(options.seconds, options.seed)
    return PoisonResult(
        **subject.described(),
        num_rounds=poisoner.num_rounds,
        memories=poisoner.memories(),
        leaks=poisoner.leaks,
        failures=tuple(poisoner.failures),
        refusals=poisoner.refusals,
        was_interrupted=was_interrupted,
    )


def run_again(
    plan: Plan, workload: SentWorkload, options: FuzzOptions, *, progress: Progress | None = None
) -> FuzzResult:
    """Run one workload again and return what comes of it, as a search of one workload.

    Raises:
        HarnessError: as `search_workloads`; ENGINE_CANNOT_SERVE where the engine does not serve the workload.
    """
    subject = _Subject.opened(plan, options, progress)
    _check_served(plan, workload, subject.engine)
    with subject.threads():
        judge = subject.judge(SequencePool.of(workload))
        golden_s = subject.elapsed_s()
        subject.report(f"{plan.case.engine}, replay", 0, 1)
        judged = judge.judge(workload, explain=True)
    if judged.is_rejected:
        assert judged.error is not None
        raise judged.error
    signature, found_s = judged.signature, subject.elapsed_s()
    return FuzzResult(
        **subject.described(),
        findings=(judged.finding(workload, signature, original=workload, found_s=found_s),) if signature else (),
        golden_s=golden_s,
        num_workloads=1,
        num_rows=workload.num_rows,
        coverage=dict.fromkeys(judged.conditions, 1),
    )


def _refuse_nothing(plan: Plan, search: Search) -> None:
    if search.num_workloads or not search.rejected or search.was_interrupted:
        return
    raise HarnessError(
        Code.NOTHING_CHECKED,
        f"the engine serves none of {search.rejected.total()} workloads",
        where=plan.case.engine,
        actual=search.rejected.most_common(1)[0][0],
        hint="declare in Capabilities.control only what the engine leaves to a workload (docs/fuzz.md)",
    )


def _unreached(capabilities: Capabilities, reached: Collection[str]) -> tuple[str, ...]:
    """Return what every engine's search must reach, as far as this engine can, and has not."""
    names = searched_schedules(capabilities)
    can_batch = capabilities.control is not None or any(ScheduleKind(name).is_batched for name in names)
    return tuple(name for name in ("decode", *(["batch"] if can_batch else [])) if name not in reached)


def _check_served(plan: Plan, workload: SentWorkload, engine: Engine) -> None:
    """Refuse a workload that the engine does not claim to follow: it would run something else."""
    control = engine.capabilities.control
    if workload.schedule is not None:
        is_served, expected = workload.schedule.partition(":")[0] in engine.capabilities.schedules, "a schedule by name"
    else:
        is_served = (
            control is not None
            and (control.aborts or not any(request.is_aborted for request in workload.requests))
            and (control.forks or all(request.fork_of is None for request in workload.requests))
        )
        expected = "arrivals, aborts and forks as in Capabilities.control"
    if not is_served:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE, f"engine {plan.case.engine!r} cannot follow the workload", where="--replay",
            expected=expected, actual=str(control),
        )  # fmt: skip
    unset = set(workload.limits) - set(control.limits if control else ()) - set(plan.engine_options)
    if unset:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE, f"engine {plan.case.engine!r} has no limit {min(unset)!r}", where="--replay",
            expected=", ".join(control.limits) if control else "no limits", actual=", ".join(sorted(unset)),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The engine and the model, opened once."""

    plan: Plan
    options: FuzzOptions
    engine: Engine
    hf: HFModel
    report: Progress
    began: float

    @classmethod
    def opened(cls, plan: Plan, options: FuzzOptions, progress: Progress | None) -> "_Subject":
        """Open both, the engine first: what it cannot do is known at once."""
        began, report = time.perf_counter(), progress or (lambda _label, _done, _total: None)
        engine = plan.open_engine()
        if engine.capabilities.control is None and not searched_schedules(engine.capabilities):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE, f"engine {plan.case.engine!r} follows no schedule that can be searched",
                where="--engine", expected="Capabilities.control, or one of " + ", ".join(SEARCHED),
                actual=", ".join(engine.capabilities.schedules) or "no schedule",
            )  # fmt: skip
        report("oracle", 0, 1)
        hf = planned_model(plan)
        return cls(plan=plan, options=options, engine=engine, hf=hf, report=report, began=began)

    def threads(self) -> AbstractContextManager[None]:
        """Use as many threads as suit the model."""
        return limit_threads(int(getattr(self.hf.config, "hidden_size", 0)))

    def elapsed_s(self) -> float:
        """Return the seconds since the engine was opened."""
        return time.perf_counter() - self.began

    def pool(self) -> SequencePool:
        """Draw the tokens of all workloads, within the context in which the truth of a row is that of any request."""
        hf, traits = self.hf, Traits.of(self.hf)
        most = traits.original_positions if frequencies_follow_length(hf.config) else hf.max_positions
        return make_pool(self.options.seed, vocab_size=hf.vocab_size, max_positions=most, window=traits.window)

    def golden(self, pool: SequencePool) -> Golden:
        """Make the pool's golden, or find it in the cache, and let the engine match its taps to the model's."""
        golden = cached_golden(self.hf, pool.prompts(), truth=self.plan.case.truth, progress=self.report)
        golden.is_pool = True
        match_taps(self.plan, self.engine, self.hf.graph)
        return golden

    def judge(self, pool: SequencePool) -> WorkloadJudge:
        """Return what judges workloads of the pool."""
        return WorkloadJudge(
            plan=self.plan,
            engine=self.engine,
            hf=self.hf,
            golden=self.golden(pool),
            limit_s=self.options.workload_seconds,
            planted=self.options.planted,
        )

    def described(self) -> dict[str, Any]:
        """Return the fields that the results of all searches have."""
        case = self.plan.case
        return {
            "engine": case.engine,
            "model": case.model,
            "dtype": case.dtype,
            "device": case.device,
            "seed": self.options.seed,
            "elapsed_s": self.elapsed_s(),
            "notes": self.plan.notes,
        }
