"""Findings of `harness fuzz` as plain data: searches, changes of schedule, poison. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from harness.errors import Code
from harness.results.check import Memory, Outcome, RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request of a workload, as it was sent to the engine."""

    token_ids: tuple[int, ...]
    """The tokens fed: prompt and continuation without its last token."""
    prompt_length: int
    arrival: int = 0
    """Steps that the engine had run when it was added."""
    is_aborted: bool = False
    """Whether it was aborted when its last row had been computed, rather than finished."""
    fork_of: int | None = None
    """Number of the request that it was forked from, when that had made its first token."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens that it makes."""
        return len(self.token_ids) - self.prompt_length + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWorkload:
    """A workload that an engine computed."""

    requests: tuple[SentRequest, ...]
    """Their numbers are their places here."""
    limits: Mapping[str, int | bool] = field(default_factory=dict)
    """Of the engine, as far as the workload sets them."""
    schedule: str | None = None
    """Name of a schedule, for engines that follow schedules by name only."""

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzFinding:
    """A workload that an engine gets wrong."""

    signature: str
    """Code and operation: they tell findings apart."""
    workload: SentWorkload
    run: RunResult | None
    """The judgement; None if the engine did not get to the end."""
    error: str | None
    """The error that ended the engine; None if it finished."""
    found_s: float
    """Seconds from the beginning of the command until a workload failed."""
    shrunk_s: float
    """Seconds that shrinking took."""
    num_rows_found: int
    """Rows of the workload that was found, before it was shrunk."""
    num_requests_found: int
    num_failures: int = 1
    """Workloads that failed in the same way."""
    workload_file: str | None = None
    """File that repeats it with `harness fuzz run --replay`."""
    case_file: str | None = None
    """Case that was seen to fail in the same way; None if no case can say what the workload says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzResult:
    """A whole search."""

    engine: str
    model: str
    dtype: str
    device: str
    seed: int
    findings: tuple[FuzzFinding, ...]
    num_workloads: int
    """Judged from beginning to end; those of shrinking are not counted."""
    num_rows: int
    rejected: Mapping[str, int] = field(default_factory=dict)
    """By the engine's words: workloads that it says it does not serve."""
    coverage: Mapping[str, int] = field(default_factory=dict)
    """By what the engine's scheduler did: workloads in which it did so."""
    golden_s: float = 0.0
    elapsed_s: float = 0.0
    was_interrupted: bool = False
    unreached: tuple[str, ...] = ()
    """Conditions without which a search that found nothing says nothing, and which no workload reached."""
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Mismatch if anything was found; nothing if too little was judged, or the search did not come to its end."""
        if self.findings:
            return Outcome.MISMATCH
        is_whole = self.num_workloads and not self.unreached and not self.was_interrupted
        return Outcome.PASS if is_whole else Outcome.NOTHING


class Invariance(StrEnum):
    """The effect of a change of schedule on an operation whose inputs are unchanged."""

    SAME = "same"
    """Not a bit changes."""
    NOISE = "noise"
    """Bits change, and no more than rounding explains."""
    BEYOND = "beyond"
    """Bits change, and the operation is wrong in one of the two runs."""
    UNKNOWN = "unknown"
    """The operation, or one before it, was not recorded; or its inputs had changed already in every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedOperation:
    """One operation of every layer under one change of schedule."""

    site: str
    state: Invariance
    num_rows: int
    """Rows that were compared: those whose inputs the change left as they are."""
    num_changed: int
    roundings_max: float
    """Largest difference of such a row, relative to its norm, in roundings of the engine's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChange:
    """The first place where a change of schedule shows: the first operation of the run in the first position."""

    tap: str
    request: int
    position: int
    roundings: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChange:
    """The effect of one change of schedule."""

    IN_DOCUMENT: ClassVar = ("state",)
    name: str
    before: str
    """The run before the change, in words."""
    after: str
    is_offered: bool
    """Whether the engine follows both schedules."""
    operations: Sequence[ChangedOperation] = ()
    """In the order of the run."""
    first: FirstChange | None = None
    error: str | None = None
    """The error that ended the run."""
    refusal: str | None = None
    """Why the engine cannot serve it here: no finding."""

    @property
    def state(self) -> Invariance:
        """The worst that it does to any operation."""
        states = {operation.state for operation in self.operations}
        worst = (Invariance.BEYOND, Invariance.NOISE, Invariance.SAME)
        return next((state for state in worst if state in states), Invariance.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceResult:
    """All changes that were tried on one engine."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    engine: str
    model: str
    dtype: str
    device: str
    seed: int
    num_rounds: int
    """Sets of prompts."""
    changes: Sequence[ScheduleChange]
    elapsed_s: float
    was_interrupted: bool = False
    notes: Sequence[str] = ()

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a change goes beyond rounding, or ended in an error; nothing without a comparison to the end."""
        if any(change.error or change.state is Invariance.BEYOND for change in self.changes):
            return Outcome.MISMATCH
        compared = any(change.state is not Invariance.UNKNOWN for change in self.changes)
        return Outcome.PASS if compared and not self.was_interrupted else Outcome.NOTHING

    @property
    def by_site(self) -> Mapping[str, Mapping[str, Invariance]]:
        """State of each operation under each change, by site and by the change's name."""
        table: dict[str, dict[str, Invariance]] = {}
        for change in self.changes:
            for operation in change.operations:
                table.setdefault(operation.site, {})[change.name] = operation.state
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """An operation that lets poisoned memory into a live row."""

    IN_DOCUMENT: ClassVar = ("code", "has_weight")
    memory: Memory
    tap: str
    """The first recorded value that changes, in the order of the run."""
    request: int
    position: int
    step: int
    phase: str
    schedule: str
    """The first under which it was seen; the place is of that run."""
    values: Sequence[str]
    """Of the poison, those that change it: `nan`, `inf`, `1e+30`."""
    poisoned_request: int | None = None
    """Whose states were poisoned, where the memory is another request's."""
    unrecorded: Sequence[str] = ()
    """Inputs of the operation that the engine does not record: one before it may be what let the poison in."""

    @property
    def code(self) -> Code:
        """Of the finding."""
        return Code.POISON_LET_IN

    @property
    def has_weight(self) -> bool:
        """Whether a finite value changes the row too, so that it is not a weight of zero times NaN."""
        return any(value not in ("nan", "inf") for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonedMemory:
    """One kind of memory over all runs."""

    memory: Memory
    num_filled: int
    """Elements that were filled, over all runs; 0: the engine has none of it, or none that can be reached."""
    schedules: Sequence[str]
    """Under which some were."""
    num_rows: int
    """Live rows that were compared, over all runs with some."""
    num_rounded: int = 0
    """Runs in which bits of a live row changed by rounding: another order of sums, as `harness fuzz --invariance` shows
    it. Nothing is let in by that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that ended in an error, or went another way, where the same run without poison did not."""

    memory: Memory
    value: str
    schedule: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonResult:
    """All that was poisoned in one engine."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    engine: str
    model: str
    dtype: str
    device: str
    seed: int
    num_rounds: int
    """Sets of prompts."""
    memories: Sequence[PoisonedMemory]
    leaks: Sequence[Leak]
    failures: Sequence[FailedRun]
    refusals: Sequence[str]
    """Schedules that the engine says it cannot serve here, each with the reason."""
    elapsed_s: float
    was_interrupted: bool = False
    notes: Sequence[str] = ()

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a live row changed; nothing where no memory of the engine's own could be poisoned.

        Scratch alone is none of its own: the recorder allocates some, too.
        """
        if self.leaks or self.failures:
            return Outcome.MISMATCH
        is_reached = any(memory.num_filled for memory in self.memories if memory.memory is not Memory.SCRATCH)
        return Outcome.PASS if is_reached and not self.was_interrupted else Outcome.NOTHING
