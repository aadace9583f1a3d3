"""Results of a gate, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class GateVerdict(StrEnum):
    """The verdict of a gate."""

    PASS = "pass"
    REGRESSION = "regression"
    """Something needs more than the baseline."""
    IMPROVED = "improved"
    """Something needs less, and nothing needs more: accept it, or a later loss stays unseen."""
    ACCEPTED = "accepted"
    """The profile is the new baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChange:
    """One figure that differs from the baseline by more than the tolerance."""

    IN_DOCUMENT: ClassVar = ("is_regression", "subject")
    phase: str
    operation: str | None
    """Tap name without the layer; None if the figure is of the whole phase."""
    measure: str
    """An operator (`aten::copy_`), or `flops`, `peak_bytes`, `num_allocations`, ..."""
    before: int
    after: int

    places: tuple[str, ...] = ()
    """Of an operator: the functions that dispatch it more or less often now: `package.module.Class.function`."""

    @property
    def subject(self) -> "Quantity":
        """Memory for bytes and allocations, counts for everything else."""
        return Quantity.MEMORY if self.measure in _OF_MEMORY else Quantity.COUNTS

    @property
    def is_regression(self) -> bool:
        """Whether more is needed than before."""
        return self.after > self.before


class TimeVerdict(StrEnum):
    """The verdict of the pairs."""

    # In the order in which the one of several phases stands for all.
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    """The machine is too noisy to decide: the interval, or the noise, is wider than the tolerance."""
    SAME = "same"
    """Neither slower nor faster by more than the tolerance."""
    FASTER = "faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median of ratios with its interval of 99 % confidence."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Time after over time before, from blocks A B B A."""

    IN_DOCUMENT: ClassVar = ("verdict",)
    ratio: Interval
    noise: Interval
    """The same of the two A of each block over those of the next: what is measured if nothing has changed."""
    num_blocks: int
    tolerance: float
    """Slowdown that is worth an alarm: 0.03 is 3 %."""

    @property
    def verdict(self) -> TimeVerdict:
        """Slower or faster only if the whole interval is beyond the tolerance."""
        is_restless = abs(self.noise.median - 1) > self.tolerance
        if self.ratio.low > 1 + self.tolerance:  # however restless the machine is
            return TimeVerdict.SLOWER
        if not is_restless and self.ratio.low > 1 and self.ratio.median > 1 + self.tolerance:
            return TimeVerdict.SLOWER
        if is_restless or self.ratio.high - self.ratio.low > 2 * self.tolerance:
            return TimeVerdict.INCONCLUSIVE
        if self.ratio.high < 1 and self.ratio.median < 1 - self.tolerance:
            return TimeVerdict.FASTER
        return TimeVerdict.SAME


class Clock(StrEnum):
    """The clock that a step's time is read from."""

    CPU = "cpu"
    """CPU time of the process, without other programs on the core. For an engine of one thread."""
    WALL = "wall"
    """Wall time: for a GPU, and for several threads, which wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase of an engine against the same phase of another version, by both clocks."""

    clock: Clock
    """The clock that decides."""
    cpu: PairedRatio
    wall: PairedRatio

    @property
    def decisive(self) -> PairedRatio:
        """The ratio by the clock that decides."""
        return self.cpu if self.clock is Clock.CPU else self.wall

    @property
    def verdict(self) -> TimeVerdict:
        """The verdict of the pairs by that clock."""
        return self.decisive.verdict


class Quantity(StrEnum):
    """The quantities that a gate compares."""

    COUNTS = "counts"
    MEMORY = "memory"
    TIME = "time"


_OF_MEMORY = {"peak_bytes", "bytes_allocated", "kv_bytes", "num_allocations", "num_kept"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """A profile against a baseline, and its engine against another version of it if that was timed."""

    key: dict[str, str]
    """Machine kind, versions and work that both are of."""
    changes: tuple[GateChange, ...]
    """The figures that grew, by phase and operation."""
    is_accepted: bool = False
    times: Mapping[str, PhaseTime] = field(default_factory=dict)
    """By phase; empty if nothing was timed."""
    not_measured: tuple[str, ...] = ()
    """Figures that the profile does not have because torch does not see the engine's memory."""

    @property
    def verdict(self) -> GateVerdict:
        """A regression if anything needs more or takes longer; the exit status follows it.

        An accepted profile may need more, but not take longer: no baseline holds a time.
        """
        subjects = self.subjects
        if subjects.get(Quantity.TIME) == TimeVerdict.SLOWER:
            return GateVerdict.REGRESSION
        if self.is_accepted:
            return GateVerdict.ACCEPTED
        if GateVerdict.REGRESSION in subjects.values():
            return GateVerdict.REGRESSION
        return GateVerdict.IMPROVED if self.changes else GateVerdict.PASS

    @property
    def subjects(self) -> dict[Quantity, GateVerdict | TimeVerdict]:
        """The verdicts on counts, on memory, and on time if it was taken."""
        verdicts: dict[Quantity, GateVerdict | TimeVerdict] = {}
        for subject in (Quantity.COUNTS, Quantity.MEMORY):
            changes = [change for change in self.changes if change.subject is subject]
            is_worse = any(change.is_regression for change in changes)
            verdicts[subject] = (
                GateVerdict.REGRESSION if is_worse else GateVerdict.IMPROVED if changes else GateVerdict.PASS
            )
        if self.times:
            time_verdicts = [time.verdict for time in self.times.values()]
            verdicts[Quantity.TIME] = min(time_verdicts, key=list(TimeVerdict).index)
        return verdicts
