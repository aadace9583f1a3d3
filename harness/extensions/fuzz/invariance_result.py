"""Changes of schedule that change an engine's bits, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from harness.results.check import Outcome


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
