"""What an engine lets in of memory that is not a row's own, as plain data for the reports; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from harness.errors import Code
from harness.results.check import Memory, Outcome


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
