"""What a gate found, as plain data: the reports know nothing else, and need no torch."""

from dataclasses import dataclass
from enum import StrEnum


class GateVerdict(StrEnum):
    """What a gate says."""

    PASS = "pass"
    REGRESSION = "regression"
    """Something needs more than it did."""
    IMPROVED = "improved"
    """Something needs less, and nothing more: worth accepting, or what is won may be lost again unseen."""
    ACCEPTED = "accepted"
    """The profile has become the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateChange:
    """One figure that differs from the baseline by more than it may."""

    phase: str
    operation: str | None
    """Tap name without the layer; None where the figure is of the whole phase."""
    measure: str
    """An operator (`aten::copy_`), or `flops`, `peak_bytes`, `num_allocations`, ..."""
    before: int
    after: int

    @property
    def is_regression(self) -> bool:
        """Whether more is needed than before."""
        return self.after > self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """A profile against a baseline."""

    key: dict[str, str]
    """Machine kind, versions and work that both are of."""
    changes: tuple[GateChange, ...]
    """What needs more first, by phase and operation."""
    is_accepted: bool = False

    @property
    def verdict(self) -> GateVerdict:
        """Regression if anything needs more."""
        if self.is_accepted:
            return GateVerdict.ACCEPTED
        if any(change.is_regression for change in self.changes):
            return GateVerdict.REGRESSION
        return GateVerdict.IMPROVED if self.changes else GateVerdict.PASS


class TimeVerdict(StrEnum):
    """What the pairs say."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    """Neither by more than the tolerance."""
    INCONCLUSIVE = "inconclusive"
    """The machine was too restless to tell: the interval, or the noise, is wider than the tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median of ratios, and where it lies with a confidence of 95 %."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Time after over time before, from blocks A B B A."""

    ratio: Interval
    noise: Interval
    """The same of the two A of each block over those of the next: what is measured where nothing has changed."""
    num_blocks: int
    tolerance: float
    """Slowdown that is worth an alarm: 0.03 is 3 %."""

    @property
    def verdict(self) -> TimeVerdict:
        """Slower or faster only beyond the tolerance, and beyond doubt."""
        if self.ratio.low > 1 + self.tolerance:  # however wide the interval is
            return TimeVerdict.SLOWER
        is_wide = self.ratio.high - self.ratio.low > self.tolerance
        if is_wide or abs(self.noise.median - 1) > self.tolerance:
            return TimeVerdict.INCONCLUSIVE
        if self.ratio.low > 1 and self.ratio.median > 1 + self.tolerance:
            return TimeVerdict.SLOWER
        if self.ratio.high < 1 and self.ratio.median < 1 - self.tolerance:
            return TimeVerdict.FASTER
        return TimeVerdict.SAME
