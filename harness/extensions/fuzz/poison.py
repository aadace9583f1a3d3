"""`harness fuzz poison`: memory that no live row may depend on is filled, and a row whose bits change is traced.

The run with poison is compared with the same run without, step by step and bit by bit. The first value that differs, in
the order of the run, is what let the poison in: all before it is the same.
"""

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from harness.base.files import scratch_folder
from harness.base.metrics import rounding_unit, row_errors
from harness.base.progress import Progress
from harness.engines import Engine
from harness.engines.poison import VALUES, Poison, scratch_filled
from harness.engines.record import RunDescription, open_writer
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.invariance import draw_prompts
from harness.extensions.fuzz.judge import timed
from harness.extensions.fuzz.result import FailedRun, Leak, PoisonedMemory
from harness.extensions.fuzz.workload import SequencePool
from harness.formats.recording import Recording, RequestInfo, Step
from harness.formats.schedule import Schedule, parse_schedule
from harness.formats.taps import Graph, Operation
from harness.judge.compare.bits import rows_differ
from harness.judge.compare.shapes import engine_dtype
from harness.judge.jobs.opened import describe_run
from harness.plan import Plan
from harness.results.check import Memory

MOST_ROUNDINGS = 128.0
"""Above the largest error that attention was seen to have in float32, 89 roundings (reports/cpu/noise-floors.md)."""
_MOST_AFTER_ROUNDING = 1.0
"""Largest difference of a request that has changed before, by rounding: what follows from that, through any layer."""
SCHEDULES = ("plain", "chunked:7", "batched", "mixed", "prefix-hit", "forked", "preempted", "rewound", "speculative")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonChange:
    """The first recorded value of a run that is not what it is in another."""

    tap: str
    request: int
    position: int
    step: int
    phase: str
    unrecorded: tuple[str, ...]
    """Inputs of the operation that are not recorded."""


@dataclass(kw_only=True)
class Poisoner:
    """An engine, and what it has let in."""

    plan: Plan
    engine: Engine
    graph: Graph
    pool: SequencePool
    progress: Progress
    limit_s: float
    """Seconds that the engine may take for one run."""
    planted: Callable[[], AbstractContextManager[object]] = nullcontext
    """Puts a known bug into the engine, anew for each run."""
    num_rounds: int = 0

    def __post_init__(self) -> None:
        offered = self.engine.capabilities.schedules
        self._schedules = [item for item in map(parse_schedule, SCHEDULES) if item.name in offered]
        self._totals = {
            memory: PoisonedMemory(memory=memory, num_filled=0, schedules=(), num_rows=0) for memory in Memory
        }
        self._leaks: dict[tuple[Memory, str], Leak] = {}
        self._refusals: dict[str, str] = {}
        self.failures: list[FailedRun] = []

    def run(self, seconds: float, seed: int) -> bool:
        """Poison round after round until the time is over; return whether it was interrupted.

        Raises:
            HarnessError: RUNS_DIFFER: two runs without poison differ; or what the engine raises in one.
        """
        began = time.perf_counter()
        try:
            while not self.num_rounds or time.perf_counter() - began < seconds:
                generator = random.Random(f"{seed}:{self.num_rounds}")
                prompts = draw_prompts(self.pool, generator)
                for at, schedule in enumerate(self._schedules):
                    label = f"{self.plan.case.engine}, round {self.num_rounds + 1}, {schedule}"
                    self.progress(label, at, len(self._schedules))
                    requests = [*prompts.subjects, *prompts.short[:1]]
                    self.poison(schedule, requests, victim=generator.choice(requests).id)
                self.num_rounds += 1
                if not any(total.num_filled for total in self._totals.values()):
                    break
        except KeyboardInterrupt:
            return True
        return False

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """The operations that let something in; a cache that nothing has set is scratch, too, and named once."""
        twice = {(Memory.SCRATCH, site) for memory, site in self._leaks if memory is Memory.UNUSED}
        return tuple(leak for key, leak in self._leaks.items() if key not in twice)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Schedules that the engine cannot serve here, and why."""
        return tuple(f"{schedule}: {why}" for schedule, why in self._refusals.items())

    def memories(self) -> tuple[PoisonedMemory, ...]:
        """Return what was filled."""
        return tuple(self._totals.values())

    def poison(self, schedule: Schedule, requests: Sequence[RequestInfo], *, victim: int) -> None:
        """Run one schedule without poison, twice, and then with each.

        The states of the request `victim` are poisoned where that is another's memory.

        Raises:
            HarnessError: as `run`.
        """
        if str(schedule) in self._refusals:
            return
        with scratch_folder("harness-") as folder:
            described = self._described(schedule, requests, folder)
            try:
                clean = self._recorded(described("clean"), None)
            except HarnessError as error:
                if error.code is not Code.ENGINE_CANNOT_SERVE:
                    raise
                self._refusals[str(schedule)] = error.what
                return
            _check_repeated(clean, self._recorded(described("again"), None), self.graph, self.plan.case.engine)
            for memory in self._memories(schedule):
                for name, value in VALUES.items():
                    poison = Poison(memory=memory, value=value, victim=victim if memory is Memory.OTHERS else None)
                    self._compare(clean, described(f"{memory}-{name}"), poison, name)
                    if not poison.num_filled:
                        break

    def _memories(self, schedule: Schedule) -> Iterator[Memory]:
        """Yield what may be poisoned under a schedule: not states of a request that others go on from."""
        is_alone = schedule.is_repeated or schedule.has_drafts or not schedule.is_batched
        yield from (memory for memory in Memory if not (memory is Memory.OTHERS and is_alone))

    def _described(
        self, schedule: Schedule, requests: Sequence[RequestInfo], folder: Path
    ) -> Callable[[str], RunDescription]:
        return lambda name: describe_run(self.plan, schedule, requests, folder / name)

    def _recorded(self, run: RunDescription, poison: Poison | None) -> Recording:
        writer, engine = open_writer(self.engine, run), self.plan.case.engine
        with writer, timed(engine, self.limit_s), self.planted(), scratch_filled(poison):
            self.engine.run(replace(run.workload, poison=poison), writer)
        return Recording.open(run.folder, verify=False).with_names(self.graph.aliases)  # written by ourselves

    def _compare(self, clean: Recording, run: RunDescription, poison: Poison, value: str) -> None:
        total, schedule = self._totals[poison.memory], str(run.schedule)
        excluded = () if poison.victim is None else (poison.victim,)
        try:
            poisoned = self._recorded(run, poison)
            pair = RunPair(before=clean, after=poisoned, graph=self.graph, excluded=excluded)
            change = pair.first_change()
        except HarnessError as error:
            failed = FailedRun(memory=poison.memory, value=value, schedule=schedule, error=error.what)
            self.failures.append(failed)
            return
        if poison.num_filled:
            self._totals[poison.memory] = replace(
                total,
                num_filled=total.num_filled + poison.num_filled,
                num_rows=total.num_rows + sum(int((~_is_of(step, excluded)).sum()) for step in clean.steps),
                num_rounded=total.num_rounded + bool(pair.rounded),
                schedules=tuple(dict.fromkeys([*total.schedules, schedule])),
            )
        if change is not None:
            self._note(change, poison, value, schedule)

    def _note(self, change: PoisonChange, poison: Poison, value: str, schedule: str) -> None:
        key = poison.memory, self.graph[change.tap].site
        known = self._leaks.get(key)
        if known is not None:
            self._leaks[key] = replace(known, values=tuple(dict.fromkeys([*known.values, value])))
            return
        self._leaks[key] = Leak(
            memory=poison.memory,
            schedule=schedule,
            values=(value,),
            poisoned_request=poison.victim,
            **asdict(change),
        )


def _check_repeated(clean: Recording, again: Recording, graph: Graph, engine: str) -> None:
    change = RunPair(before=clean, after=again, graph=graph, most_roundings=0.0).first_change()
    if change is not None:
        raise HarnessError(
            Code.RUNS_DIFFER,
            "two runs of the same workload without poison differ",
            where=f"{engine}, schedule {clean.manifest.schedule}, step {change.step}, request {change.request}",
            expected="the same bits",
            actual=f"other bits in {change.tap} at position {change.position}",
            hint="make the engine deterministic; if it is, it reads memory that nothing has set",
        )


@dataclass(kw_only=True)
class RunPair:
    """Two runs of one workload, of which the second may have let something in."""

    before: Recording
    after: Recording
    graph: Graph
    """Values that it does not name are not looked at."""
    excluded: Collection[int] = ()
    """Ids of requests that are not looked at."""
    most_roundings: float = MOST_ROUNDINGS
    """Largest difference of a row, relative to its norm, that is taken for another order of its sums."""

    def __post_init__(self) -> None:
        self._unit = rounding_unit(engine_dtype(self.before))
        self.rounded: set[int] = set()
        """Requests whose bits have changed by no more: an expert that gets another number of rows, for example."""

    def first_change(self) -> PoisonChange | None:
        """Return the first value that differs by more: by step, then in the order of the graph.

        Raises:
            HarnessError: ENGINE_FAILED: the second run computes other rows.
        """
        if [_rows(step) for step in self.before.steps] != [_rows(step) for step in self.after.steps]:
            what = "the engine computes other rows than without poison"
            raise HarnessError(Code.ENGINE_FAILED, what, where=str(self.after.manifest.schedule))
        for left, right in zip(self.before.steps, self.after.steps, strict=True):
            for operation in self.graph:
                row = self._changed_row(left, right, operation.tap) if left.has(operation.tap) else None
                if row is not None:
                    return _change(left, row, operation)
        return None

    def _changed_row(self, left: Step, right: Step, tap: str) -> int | None:
        """Return the first row of a step that another order of sums does not explain."""
        covered = left.rows_of(tap)
        rows = torch.arange(len(left.request)) if covered is None else covered
        ours, theirs = left.tap(tap).flatten(1), right.tap(tap).flatten(1)
        changed = (rows_differ(ours, theirs) & ~_is_of(left, self.excluded)[rows]).nonzero()[:, 0]
        if not len(changed):
            return None
        is_rounded = _is_of(left, self.rounded)[rows[changed]]
        limits = torch.where(is_rounded, _MOST_AFTER_ROUNDING, self.most_roundings * self._unit)
        is_beyond = ~(self._differences(ours[changed], theirs[changed]) <= limits)
        if is_beyond.any():
            return int(rows[changed][is_beyond][0])
        self.rounded |= set(left.request[rows[changed]].tolist())
        return None

    @staticmethod
    def _differences(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """[rows] float64: relative to the norm; of indices, all or nothing."""
        if ours.is_floating_point():
            return row_errors(theirs, ours)
        return torch.ones(len(ours), dtype=torch.float64)


def _rows(step: Step) -> tuple[str, list[int], list[int], list[str]]:
    return step.phase, step.request.tolist(), step.position.tolist(), sorted(step.tap_names)


def _is_of(step: Step, requests: Collection[int]) -> torch.Tensor:
    return torch.tensor([request in requests for request in step.request.tolist()], dtype=torch.bool)


def _change(step: Step, row: int, operation: Operation) -> PoisonChange:
    return PoisonChange(
        tap=operation.tap,
        request=int(step.request[row]),
        position=int(step.position[row]),
        step=step.index,
        phase=step.phase,
        unrecorded=tuple(tap for tap in operation.inputs if not step.has(tap)),
    )
