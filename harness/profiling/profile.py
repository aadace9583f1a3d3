"""A whole profile: the four passes over each phase of an engine run one after another, so that none distorts another.

`keep_profile` keeps it in a folder: captures, `profile.json` and one page.
"""

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from harness.base.environment import describe_environment
from harness.base.files import write_text
from harness.base.progress import Progress, no_progress
from harness.base.threads import limit_threads
from harness.engines.stepping import ClosableSession, open_session
from harness.errors import Code, HarnessError
from harness.formats.case import ProfileSection
from harness.plan import Plan
from harness.profiling.counters import PhaseCounts, count
from harness.profiling.formulas import Cost, kv_bytes, operation_costs
from harness.profiling.gate.baseline import PROFILE_NAME
from harness.profiling.load import (
    CaptureSchedule,
    PlannedStep,
    ProfileRequests,
    ProfileWorkload,
    Window,
    dry_run,
    window,
)
from harness.profiling.memory.capture import MemoryCapture, capture_memory
from harness.profiling.roofline import best_of, bound_by, fold, measure_ceilings, point
from harness.profiling.timing import Latencies, ProfileProgress, measure, percentiles_ms, plan_parts
from harness.profiling.trace.tables import PhaseTables, read_events, tables
from harness.profiling.tracing import trace
from harness.report.page.html import REPORT_NAME, report_html
from harness.report.profile import profile_document
from harness.results.check import CheckResult
from harness.results.profile import Ceilings, Overhead, PhaseProfile, ProfileResult, RooflinePoint

MIN_ATTRIBUTED_SHARE = 0.95
"""Below this share of a trace inside named operations, the system interrupted the thread between two operations."""
BUSY_RATIO = 1.25
"""From this ratio of wall time to CPU time, or of the slowest run to the fastest, a note says: the machine was busy."""
_MAX_CAPTURES = 3
"""The most traces of a phase until enough of one is attributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """A profile to be made, with every name resolved."""

    plan: Plan
    """The engine and its checkpoint; requests are those of the workload."""
    workload: ProfileWorkload = field(default_factory=ProfileWorkload)
    phases: tuple[str, ...] = ()
    """Empty: all that the engine has."""
    schedule: CaptureSchedule = field(default_factory=CaptureSchedule)
    num_runs: int = 5
    """Runs of the load without a profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The results of the passes over one phase."""

    window: Window
    paths: tuple[Path, ...]
    tables: PhaseTables
    memory: MemoryCapture | None
    snapshot: Path | None
    counts: PhaseCounts


def run_profile(spec: ProfileSpec, out: Path, progress: Progress | None = None) -> ProfileResult:
    """Profile an engine and write its traces and memory snapshots into `out`, an existing folder.

    Raises:
        HarnessError: the engine offers no steps, a phase has none, a recorder runs already, or the profiler failed.
            What was captured before stays in `out`, and the engine and torch are as they were.
        ProfileInterrupted: Ctrl-C, when some phase was finished.
    """
    report = progress or no_progress
    report("loading", 0, 1)
    with limit_threads(spec.plan.checkpoint.hidden_size):
        engine = spec.plan.open_engine()
        workload = spec.workload
        session = open_session(
            engine,
            max_num_tokens=workload.max_num_tokens,
            max_num_seqs=workload.batch_size + 1,
        )
        with closing(session):
            return _Profile(spec, session, out, report).run()


class ProfileInterrupted(KeyboardInterrupt):
    """Ctrl-C, with the profile of the phases that were finished."""

    def __init__(self, result: ProfileResult) -> None:
        self.result = result
        super().__init__()


class _Profile:
    """A profile in progress."""

    def __init__(self, spec: ProfileSpec, session: ClosableSession, out: Path, report: Progress) -> None:
        self._spec, self._session, self._out, self._report = spec, session, out, report
        self._seconds: dict[ProfileRequests, float] = {}
        """Of one plain run of each load."""
        self._estimate = ProfileProgress(report)
        self._about = describe_environment() | {
            "engine": spec.plan.case.engine,
            "model": spec.plan.case.model,
            "dtype": spec.plan.case.dtype,
            "device": spec.plan.case.device,
            "options": " ".join(f"{name}={value}" for name, value in spec.plan.engine_options.items()),
        }

    def run(self) -> ProfileResult:
        """Run all passes.

        Raises:
            ProfileInterrupted: Ctrl-C, with what was finished.
        """
        spec = self._spec
        ceilings = measure_ceilings(getattr(torch, spec.plan.case.dtype), spec.plan.case.device)
        windows = self._windows()
        # Latencies are always those of the main load.
        seconds = {self._main_load(): max(self._seconds.values())} | self._seconds
        self._estimate.parts = plan_parts(windows, seconds, spec.num_runs)
        latencies = self._latencies(seconds)
        passes: list[_Pass] = []
        is_interrupted = False
        try:
            for window in windows:
                passes.append(self._capture(window))  # noqa: PERF401  what was finished is needed
        except KeyboardInterrupt:
            if not passes:
                raise
            is_interrupted = True
        ceilings = best_of(ceilings, measure_ceilings(getattr(torch, spec.plan.case.dtype), spec.plan.case.device))
        phases = [self._phase(phase_pass, latencies[phase_pass.window.load], ceilings) for phase_pass in passes]
        result = self._result(latencies[self._main_load()], phases, passes, ceilings)
        if is_interrupted:
            left_out = ", ".join(window.phase for window in windows[len(passes) :])
            raise ProfileInterrupted(replace(result, notes=(*result.notes, f"interrupted: without {left_out}")))
        return result

    def _latencies(self, seconds: Mapping[ProfileRequests, float]) -> dict[ProfileRequests, Latencies]:
        """Time each load without a profiler."""
        latencies = {}
        for number, load in enumerate(seconds):
            self._estimate.begin(f"timing {number}")
            latencies[load] = measure(
                self._session,
                load,
                num_runs=self._spec.num_runs,
                device=self._spec.plan.case.device,
                ran=lambda done: self._estimate.part_done(done / self._spec.num_runs),
            )
        return latencies

    def _main_load(self) -> ProfileRequests:
        return self._spec.workload.load(self._session.model.vocab_size)

    def _windows(self) -> list[Window]:
        """Run each load and find the steps of each phase in it."""
        phases = tuple(dict.fromkeys(self._spec.phases or self._session.phases))
        for phase in phases:
            if phase not in self._session.phases:
                raise HarnessError(
                    Code.PHASE_WITHOUT_STEP,
                    f"engine {self._spec.plan.case.engine!r} has no steps of phase {phase!r}",
                    where="--phase",
                    expected=", ".join(self._session.phases),
                    actual=phase,
                )
        main = self._main_load()
        steps: dict[ProfileRequests, tuple[PlannedStep, ...]] = {}
        windows = []
        for phase in phases:
            load = self._spec.workload.mixed_load(self._session.model.vocab_size) if phase == "mixed" else main
            self._report(f"warming up for {phase}", 0, len(phases))
            if load not in steps:
                begin = time.perf_counter()
                steps[load] = dry_run(self._session, load)
                self._seconds[load] = (time.perf_counter() - begin) / 2  # it runs the load twice
            windows.append(window(phase, load, steps[load], self._spec.schedule))
        return windows

    def _capture(self, window: Window) -> _Pass:
        spec = self._spec
        worker = f"{spec.plan.case.engine}-{window.phase}-r0"
        (self._out / "trace").mkdir(exist_ok=True)
        self._estimate.begin(f"{window.phase}, trace")
        paths, phase_tables = self._trace(window, worker)
        self._estimate.begin(f"{window.phase}, memory")
        memory = snapshot = None
        if self._session.shows_memory:
            snapshot = self._out / "memory" / f"{worker}.pickle"
            snapshot.parent.mkdir(exist_ok=True)
            memory = capture_memory(self._session, window, snapshot, device=spec.plan.case.device)
        self._estimate.begin(f"{window.phase}, counters")
        counts = count(self._session, window, device=spec.plan.case.device)
        return _Pass(window=window, paths=paths, tables=phase_tables, memory=memory, snapshot=snapshot, counts=counts)

    def _trace(self, window: Window, worker: str) -> tuple[tuple[Path, ...], PhaseTables]:
        """Trace a window, and again if the system interrupted the thread so that too little is attributed."""
        names = {name for step in window.steps for name in step.names}
        folder = self._out / "trace"
        about = {**self._about, "config": self._spec.plan.checkpoint.config}
        for attempt in range(_MAX_CAPTURES):
            paths = trace(self._session, window, folder, worker=worker, device=self._spec.plan.case.device, about=about)
            phase_tables = tables(read_events(paths[-1]), names)
            if phase_tables.attributed_share >= MIN_ATTRIBUTED_SHARE or attempt == _MAX_CAPTURES - 1:
                break
            for path in paths:
                path.unlink()
        return paths, phase_tables

    def _phase(self, phase_pass: _Pass, latencies: Latencies, ceilings: Ceilings) -> PhaseProfile:
        window = phase_pass.window
        wall_s, (fastest_s, slowest_s) = latencies.wall_s(window), latencies.wall_s_range(window)
        cpu_s, num_switches = latencies.cpu_s_median(window), latencies.switches_median(window)
        # With several threads, or a GPU, CPU time does not tell how long the work takes.
        is_single = torch.get_num_threads() == 1 and torch.device(self._spec.plan.case.device).type == "cpu"
        times_s = (wall_s, fastest_s, slowest_s, *([cpu_s] if is_single and cpu_s else []))
        costs = operation_costs(self._session.model, window.shapes)
        whole = sum(costs.values(), Cost(site=window.phase))
        timeline = None if phase_pass.memory is None else phase_pass.memory.timeline
        return PhaseProfile(
            name=window.phase,
            steps=window.shapes,
            wall_ms=wall_s * 1e3,
            trace_wall_ms=phase_pass.tables.wall_us / 1e3,
            attributed_share=phase_pass.tables.attributed_share,
            flops_measured=phase_pass.counts.flops,
            flops_formula=whole.flops,
            bytes_formula=whole.bytes_moved,
            kv_bytes_measured=phase_pass.counts.kv_bytes,
            kv_bytes_formula=kv_bytes(self._session.model, window.shapes_so_far),
            peak_bytes=None if timeline is None else timeline.peak.allocated_bytes if timeline.peak else 0,
            bytes_allocated=phase_pass.counts.bytes_allocated if timeline else None,
            num_python_calls=phase_pass.counts.num_python_calls,
            mfu=whole.flops / wall_s / ceilings.matmul_flops_per_s,
            mbu=whole.bytes_moved / wall_s / ceilings.copy_bytes_per_s,
            bound_by=bound_by(whole.flops, whole.bytes_moved, wall_s, ceilings),
            wall_ms_range=(fastest_s * 1e3, slowest_s * 1e3),
            cpu_ms=cpu_s * 1e3,
            num_involuntary_switches=num_switches,
            bound_by_within_noise=tuple(
                dict.fromkeys(bound_by(whole.flops, whole.bytes_moved, time_s, ceilings) for time_s in times_s)
            ),
            counts=phase_pass.counts.counts,
            layers=phase_pass.tables.layers,
            operations=phase_pass.tables.operations,
            operators=phase_pass.tables.operators,
            roofline=(point(window.phase, whole, wall_s * 1e6, ceilings), *_points(phase_pass.tables, costs, ceilings)),
            memory=timeline,
            traces=tuple(str(path.relative_to(self._out)) for path in phase_pass.paths),
            snapshot=str(phase_pass.snapshot.relative_to(self._out)) if phase_pass.snapshot else None,
            notes=_notes(phase_pass, wall_s, fastest_s, slowest_s, cpu_s if is_single else None),
        )

    def _result(
        self, latencies: Latencies, phases: list[PhaseProfile], passes: list[_Pass], ceilings: Ceilings
    ) -> ProfileResult:
        spec, plain_s = self._spec, sum(phase.wall_ms for phase in phases) / 1e3
        memories = [phase_pass.memory for phase_pass in passes if phase_pass.memory is not None]
        return ProfileResult(
            engine=spec.plan.case.engine,
            model=spec.plan.case.model,
            dtype=spec.plan.case.dtype,
            device=spec.plan.case.device,
            batch_size=spec.workload.batch_size,
            num_prompt_tokens=spec.workload.num_prompt_tokens,
            max_new_tokens=spec.workload.max_new_tokens,
            lengths=spec.workload.lengths,
            ttft_ms=percentiles_ms(latencies.ttft_s),
            tpot_ms=percentiles_ms(latencies.tpot_s) if latencies.tpot_s else None,
            inter_token_ms=percentiles_ms(latencies.inter_token_s) if latencies.inter_token_s else None,
            tokens_per_second=latencies.tokens_per_second,
            phases=tuple(phases),
            overhead=Overhead(
                trace=sum(phase_pass.tables.wall_us for phase_pass in passes) / 1e6 / plain_s,
                memory=sum(memory.elapsed_s for memory in memories) / plain_s if memories else None,
                counters=sum(phase_pass.counts.elapsed_s for phase_pass in passes) / plain_s,
            ),
            ceilings=ceilings,
            environment=tuple(self._about.items()),
            notes=(*self._session.notes, *spec.workload.notes),
        )


def _points(phase_tables: PhaseTables, costs: Mapping[str, Cost], ceilings: Ceilings) -> list[RooflinePoint]:
    folded = fold(costs, {row.name for row in phase_tables.operations})
    # On a GPU the time of an operation is that of its launches; the roofs limit the time of its kernels.
    times = {row.name: row.total_us if row.device_us is None else row.device_us for row in phase_tables.operations}
    return [point(name, cost, times[name], ceilings) for name, cost in folded.items() if times.get(name)]


def _notes(
    phase_pass: _Pass, wall_s: float, fastest_s: float, slowest_s: float, cpu_s: float | None
) -> tuple[str, ...]:
    notes = []
    if phase_pass.tables.attributed_share < MIN_ATTRIBUTED_SHARE:
        notes.append(
            f"{phase_pass.tables.attributed_share:.1%} of the trace is attributed, after {_MAX_CAPTURES} captures: "
            "the machine is busy with something else"
        )
    if cpu_s is not None and wall_s > BUSY_RATIO * cpu_s:
        notes.append(
            f"the machine was busy: of {wall_s * 1e3:.2f} ms of wall time the process had a core for "
            f"{cpu_s * 1e3:.2f} ms"
        )
    elif slowest_s > BUSY_RATIO * fastest_s:
        notes.append(
            f"times vary: the runs took {fastest_s * 1e3:.2f} to {slowest_s * 1e3:.2f} ms; other work on the "
            "machine, or too few runs"
        )
    return tuple(notes)


def planned_profile(plan: Plan) -> ProfileSpec:
    """Return the profile of a plan's engine: of the case's own `[profile]`, or of the default workload."""
    section = plan.case.profile or ProfileSection()
    workload = ProfileWorkload(
        batch_size=section.batch_size,
        num_prompt_tokens=section.prompt_tokens,
        max_new_tokens=section.max_new_tokens,
    )
    return ProfileSpec(plan=plan, workload=workload, phases=tuple(section.phases))


def keep_profile(
    spec: ProfileSpec, out: Path, *, check: CheckResult | None = None, progress: Progress | None = None
) -> ProfileResult:
    """Profile an engine into a folder that exists.

    Raises:
        HarnessError: as `run_profile`; what was captured before stays.
        ProfileInterrupted: Ctrl-C; the phases that were finished are written.
    """
    try:
        result = replace(run_profile(spec, out, progress), report=REPORT_NAME)
    except ProfileInterrupted as interrupted:
        _write(replace(interrupted.result, report=REPORT_NAME), out, check)
        raise
    _write(result, out, check)
    return result


def _write(result: ProfileResult, out: Path, check: CheckResult | None) -> None:
    write_text(out / REPORT_NAME, report_html(check, result))
    write_text(out / PROFILE_NAME, json.dumps(profile_document(result), allow_nan=False))
