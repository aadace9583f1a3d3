"""`harness fuzz invariance`: which change of schedule alone changes bits, in which operation, and by how much.

Where training and rollout must agree, or an answer must not depend on who else is served, rounding is a bug. So two
runs that differ in nothing but the schedule are compared bit by bit; the golden only says whether what changed is still
rounding.
"""

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.base.files import scratch_folder
from harness.base.progress import Progress
from harness.engines import Engine
from harness.engines.record import open_writer
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.judge import timed
from harness.extensions.fuzz.result import ChangedOperation, FirstChange, Invariance, ScheduleChange
from harness.extensions.fuzz.workload import SequencePool
from harness.formats.recording import Recording, RequestInfo
from harness.formats.schedule import Schedule, parse_schedule
from harness.judge.compare.bits import ComparedRows, compare_bits, first_changed
from harness.judge.compare.coverage import LEAST_JUDGED
from harness.judge.jobs.check import compare_planned
from harness.judge.jobs.opened import describe_run
from harness.oracle.golden import Golden
from harness.oracle.model import HFModel
from harness.plan import Plan
from harness.results.check import Outcome

NUM_SUBJECTS = 3
NUM_NEW = 4
"""Tokens that each request makes."""
_SHORT = 6
"""Tokens of a request that is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The requests of one round."""

    subjects: Sequence[RequestInfo]
    """Requests that every run computes."""
    short: Sequence[RequestInfo]
    """Short company for them."""
    long: Sequence[RequestInfo]
    """Company whose KV is longer than theirs."""


def draw_prompts(pool: SequencePool, generator: random.Random) -> Prompts:
    """Draw the requests of a round: subjects of three lengths, and the beginnings of others as their company."""
    longest = pool.num_tokens - NUM_NEW + 1
    sequences = generator.sample(range(len(pool.sequences)), NUM_SUBJECTS + 2)
    middle = range(max(2, longest // 3), max(3, longest - longest // 4))
    subjects = [_request(pool, at, sequence, generator.choice(middle)) for at, sequence in enumerate(sequences[:-2])]
    first = len(subjects)
    short = [_request(pool, first + at, item, min(_SHORT, longest)) for at, item in enumerate(sequences[-2:])]
    long = [_request(pool, first + at, item, longest) for at, item in enumerate(sequences[-2:])]
    return Prompts(subjects=subjects, short=short, long=long)


def _request(pool: SequencePool, number: int, sequence: int, length: int) -> RequestInfo:
    tokens = list(pool.sequences[sequence][: length + NUM_NEW - 1])
    return RequestInfo(id=number, token_ids=tokens, prompt_length=len(tokens) - NUM_NEW + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """A run of an engine: some requests under a schedule."""

    schedule: str
    company: str = "none"
    """`none`, `short` or `long`: who is there besides the subjects."""
    is_reversed: bool = False
    number: int = 0
    """Runs that are alike in all else are told apart by it."""

    def parsed(self) -> Schedule:
        """Return the schedule."""
        return parse_schedule(self.schedule)

    def requests(self, prompts: Prompts) -> list[RequestInfo]:
        """Return the requests in the order in which they are sent."""
        company = {"none": [], "short": prompts.short, "long": prompts.long}[self.company]
        requests = [*prompts.subjects, *company]
        return requests[::-1] if self.is_reversed else requests


@dataclass(frozen=True, slots=True)
class Variation:
    """Two runs, and in words what is different."""

    name: str
    before: str
    after: str
    runs: tuple[RunSetting, RunSetting]


_ALONE, _TOGETHER = RunSetting(schedule="plain"), RunSetting(schedule="batched")
_AGAIN, _REVERSED = replace(_ALONE, number=1), replace(_TOGETHER, is_reversed=True)
_AMONG_SHORT, _AMONG_LONG = replace(_TOGETHER, company="short"), replace(_TOGETHER, company="long")

CHANGES = (
    Variation("repetition", "alone", "alone, again", (_ALONE, _AGAIN)),
    Variation("batch mates", "alone", "in one batch", (_ALONE, _TOGETHER)),
    Variation("order", "in one batch", "in one batch, the last first", (_TOGETHER, _REVERSED)),
    Variation("KV length", "beside short requests", "beside long ones", (_AMONG_SHORT, _AMONG_LONG)),
    Variation("chunk", "prompts whole", "in chunks of 7", (_ALONE, RunSetting(schedule="chunked:7"))),
    Variation("decode", "prompts whole", "token by token", (_ALONE, RunSetting(schedule="chunked:1"))),
    Variation("mixed", "alone", "chunks beside decodes", (_ALONE, RunSetting(schedule="mixed"))),
    Variation("prefix hit", "computed", "found in the cache", (_ALONE, RunSetting(schedule="prefix-hit"))),
    Variation("fork", "alone", "forked", (_ALONE, RunSetting(schedule="forked"))),
    Variation("preemption", "in one batch", "preempted", (_TOGETHER, RunSetting(schedule="preempted"))),
    Variation("ranks", "one rank", "two ranks", (_TOGETHER, RunSetting(schedule="tensor-parallel:2"))),
)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One run, and the operations that the check finds wrong in it."""

    recording: Recording
    wrong: frozenset[str]


@dataclass(slots=True)
class _Total:
    """The effect of a change on one operation of all layers."""

    num_rows: int = 0
    num_changed: int = 0
    roundings_max: float = 0.0
    is_beyond: bool = False

    def add(self, rows: ComparedRows, *, is_wrong: bool) -> None:
        """Add some rows; `is_wrong` says that the check finds their operation wrong in one of the runs."""
        self.num_rows += len(rows.position)
        self.num_changed += int(rows.is_changed.sum())
        self.roundings_max = max(self.roundings_max, float(rows.roundings.max()))
        self.is_beyond |= is_wrong and bool(rows.is_changed.any())

    @property
    def state(self) -> Invariance:
        """The verdict on it."""
        if self.num_changed:
            return Invariance.BEYOND if self.is_beyond else Invariance.NOISE
        return Invariance.SAME if self.num_rows else Invariance.UNKNOWN


@dataclass(slots=True)
class _Comparison:
    """The effect of a change, summed over rounds."""

    change: Variation
    totals: dict[str, _Total] = field(default_factory=lambda: defaultdict(_Total))
    """By site."""
    first: ComparedRows | None = None
    error: str | None = None
    refusal: str | None = None

    def fail(self, error: HarnessError) -> None:
        """Note that a run of the change ended in an error: that the engine cannot do it, or the first other one."""
        if error.code is Code.ENGINE_CANNOT_SERVE:
            self.refusal = error.what
        else:
            self.error = self.error or error.what


@dataclass(kw_only=True)
class Comparer:
    """An engine, what it is held to, and what was found."""

    plan: Plan
    engine: Engine
    hf: HFModel
    golden: Golden
    pool: SequencePool
    progress: Progress
    limit_s: float
    """Longest time of a run."""
    num_rounds: int = 0

    def __post_init__(self) -> None:
        self._comparisons = {change.name: _Comparison(change) for change in CHANGES if self._is_offered(change)}

    def run(self, seconds: float, seed: int) -> bool:
        """Compare round after round until the time is over; return whether it was interrupted."""
        began = time.perf_counter()
        try:
            while not self.num_rounds or (self._has_compared and time.perf_counter() - began < seconds):
                self._round(draw_prompts(self.pool, random.Random(f"{seed}:{self.num_rounds}")))
                self.num_rounds += 1
        except KeyboardInterrupt:
            return True
        return False

    @property
    def _has_compared(self) -> bool:
        """Whether some change did not end in an error: where all have, another round says nothing more."""
        return any(comparison.error is None and comparison.refusal is None for comparison in self._comparisons.values())

    def _is_offered(self, change: Variation) -> bool:
        return all(run.parsed().name in self.engine.capabilities.schedules for run in change.runs)

    def _round(self, prompts: Prompts) -> None:
        """Try every change on one set of requests; a run that two changes share is run once."""
        with scratch_folder("harness-") as folder:
            runs: dict[RunSetting, _Recorded | HarnessError] = {}
            for at, comparison in enumerate(self._comparisons.values()):
                self.progress(f"{self.plan.case.engine}, round {self.num_rounds + 1}", at, len(self._comparisons))
                for run in comparison.change.runs:
                    if run not in runs:
                        runs[run] = self._recorded(run, prompts, folder / str(len(runs)))
                self._compare(comparison, *(runs[run] for run in comparison.change.runs))

    def _recorded(self, run: RunSetting, prompts: Prompts, path: Path) -> _Recorded | HarnessError:
        engine, asked = self.plan.case.engine, describe_run(self.plan, run.parsed(), run.requests(prompts), path)
        try:
            with open_writer(self.engine, asked) as writer, timed(engine, self.limit_s):
                self.engine.run(asked.workload, writer)
        except HarnessError as error:
            return error
        recording = Recording.open(path, verify=False).with_names(self.hf.graph.aliases)  # written by ourselves
        judged = compare_planned(self.plan, self.engine.capabilities, recording, self.golden, self.hf)
        if judged.result.outcome is Outcome.NOTHING:
            raise HarnessError(
                Code.NOTHING_CHECKED, "the engine records too little to compare two runs of it",
                where=self.plan.case.engine,
                expected=f"outputs behind {LEAST_JUDGED:.0%} of the model's multiply-adds",
                actual=f"{judged.result.coverage.judged_compute or 0.0:.0%}",
            )  # fmt: skip
        wrong = frozenset(tap.name for tap in judged.result.taps if tap.verdict.is_wrong)
        return _Recorded(recording, wrong)

    def _compare(
        self, comparison: _Comparison, before: _Recorded | HarnessError, after: _Recorded | HarnessError
    ) -> None:
        for item in (before, after):
            if isinstance(item, HarnessError):
                comparison.fail(item)
                return
        assert isinstance(before, _Recorded)
        assert isinstance(after, _Recorded)
        compared = list(compare_bits(before.recording, after.recording, self.hf.graph))
        for rows in compared:
            is_wrong = rows.operation.tap in before.wrong | after.wrong
            comparison.totals[rows.operation.site].add(rows, is_wrong=is_wrong)
        comparison.first = comparison.first or first_changed(compared, self.hf.graph)

    def changes(self) -> tuple[ScheduleChange, ...]:
        """Return what was found, change by change."""
        return tuple(self._result(change) for change in CHANGES)

    def _result(self, change: Variation) -> ScheduleChange:
        comparison = self._comparisons.get(change.name)
        sites = list(dict.fromkeys(operation.site for operation in self.hf.graph if operation.kind.value != "cache"))
        return ScheduleChange(
            name=change.name,
            before=change.before,
            after=change.after,
            is_offered=comparison is not None,
            operations=() if comparison is None else tuple(_operation(site, comparison) for site in sites),
            first=None if comparison is None or comparison.first is None else _first(comparison.first),
            error=None if comparison is None else comparison.error,
            refusal=None if comparison is None else comparison.refusal,
        )


def _operation(site: str, comparison: _Comparison) -> ChangedOperation:
    total = comparison.totals[site]
    return ChangedOperation(
        site=site,
        state=total.state,
        num_rows=total.num_rows,
        num_changed=total.num_changed,
        roundings_max=total.roundings_max,
    )


def _first(rows: ComparedRows) -> FirstChange:
    return FirstChange(
        tap=rows.operation.tap,
        request=rows.request,
        position=int(rows.position[0]),
        roundings=float(rows.roundings[0]),
    )
