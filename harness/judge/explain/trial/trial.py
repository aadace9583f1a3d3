"""One hypothesis against the wrong rows: the rows that it holds for, and whether they are enough to assert it."""

import math
from dataclasses import dataclass, field

import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_FALL = 0.5
_MIN_SHARE = 0.5
"""Share of the rows that a cause must explain; below it, it is none."""
_VALUES_PER_NUMBER = 1.5
"""Independent values that each fitted number needs: with fewer, it would fit anything."""
_VALUES_NEAR_THE_BOUND = 10.0
"""The same where the error is near the bound: what is fitted there is fitted to rounding, too."""
_NEAR = 4.0
"""Times the bound up to which one row is too little: what rounding leaves of it could come out by chance."""
_FINEST = 0.5
"""Roundings below which one residual is as good as another."""
DEPENDENT = 4.0
"""Rounding errors of a row depend on each other: so many of its values count as one where fits are compared."""
CLEARLY = 3.0
"""Natural logarithm of the odds from which one fit is better than another."""
_SAME_RESIDUAL = 0.02
"""Difference of the logarithms of two residuals below which neither is the better fit, over any number of rows."""


@dataclass(frozen=True, slots=True)
class WrongRows:
    """The wrong rows, as far as every hypothesis is held against them."""

    failure: Failure
    roundings: torch.Tensor
    """[R] their errors against what they should be."""
    bound: torch.Tensor
    """[R] the errors that rounding explains."""
    attention: Failure | None = None
    """The same rows as rows of the attention before the operation, where that was not recorded."""
    failures: list[str] = field(default_factory=list)
    """Explanations that raised."""

    def distinct(self, rows: torch.Tensor) -> int:
        """Count the rows, of a mask [R], that are not copies of each other."""
        return len(self.failure.actual[rows].unique(dim=0)) if bool(rows.any()) else 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One hypothesis and how it went."""

    hypothesis: Hypothesis
    residual: torch.Tensor
    """[R] roundings."""
    holds: torch.Tensor
    """[R] bool."""
    num_values: float
    """Independent values of the rows that it holds for."""
    is_supported: bool
    """Whether these rows are enough for what was fitted to them."""

    @classmethod
    def of(cls, hypothesis: Hypothesis, evidence: WrongRows) -> "Trial":
        """Hold a hypothesis against the wrong rows."""
        failure, bound = evidence.failure, evidence.bound.clamp(min=1)
        error = (failure.actual - hypothesis.output).norm(dim=1)
        relative = torch.where(error == 0, 0.0, error / hypothesis.output.norm(dim=1))
        residual = (relative / rounding_unit(failure.dtype)).nan_to_num(nan=torch.inf)
        holds = (residual <= hypothesis.allowance * bound) & (residual <= _FALL * evidence.roundings)
        num_rows = evidence.distinct(holds)
        num_values = num_rows * failure.num_elements
        is_near = bool(holds.any()) and float((evidence.roundings / bound)[holds].median()) < _NEAR
        needed = hypothesis.freedom * (_VALUES_NEAR_THE_BOUND if is_near else _VALUES_PER_NUMBER)
        is_supported = needed <= num_values and not (is_near and num_rows < 2)
        unknown = hypothesis.unknown
        if unknown is not None and bool(holds[~unknown].any()) and bool(holds[~unknown].all()):
            holds = holds | unknown
        return cls(hypothesis, residual, holds, num_values, is_supported)

    @property
    def share(self) -> float:
        """Of the rows, that it holds for."""
        return float(self.holds.float().mean())

    @property
    def is_cause(self) -> bool:
        """Whether it may be asserted."""
        return self.hypothesis.is_cause and self.fits

    @property
    def fits(self) -> bool:
        """Whether it says what was seen."""
        return self.is_supported and self.share >= _MIN_SHARE

    @property
    def known(self) -> torch.Tensor:
        """[R] bool: rows that it holds for and whose numbers it says."""
        unknown = self.hypothesis.unknown
        return self.holds if unknown is None else self.holds & ~unknown

    @property
    def margin(self) -> float:
        """Rows by which two may differ and still explain as many."""
        return max(1.0, 0.02 * len(self.holds))

    def is_better_than(self, other: "Trial") -> bool:
        """More rows explained; of about as many, by much the likelier fit, each fitted number taken into account."""
        difference = int(self.holds.sum()) - int(other.holds.sum())
        if abs(difference) >= self.margin:
            return difference > 0
        lag = other.lags(self)
        if abs(lag) <= CLEARLY:
            return other.hypothesis.is_vague and not self.hypothesis.is_vague
        return lag > 0

    def is_as_good_as(self, best: "Trial") -> bool:
        """Whether the rows cannot tell the two apart."""
        if self.hypothesis.is_vague and not best.hypothesis.is_vague:
            return False
        difference = int(best.holds.sum()) - int(self.holds.sum())
        return abs(difference) < self.margin and self.lags(best) <= CLEARLY

    def names(self, fitted: "Trial") -> bool:
        """Whether it explains as many rows as one with fitted numbers does, without any.

        A number that is fitted follows how the rows were rounded: its residual is the less, and says nothing.
        """
        missed = int(fitted.holds.sum()) - int(self.holds.sum())
        is_exact = not self.hypothesis.freedom and not self.hypothesis.is_vague
        return is_exact and self.fits and missed < self.margin

    def lags(self, other: "Trial") -> float:
        """Return by how much this fit is the less likely, as the logarithm of the odds.

        The residuals of rows that both hold for are taken for Gaussian, and each fitted number costs what it does in
        the Bayesian information criterion (Schwarz 1978).
        """
        both = self.known & other.known
        if not bool(both.any()):
            return 0.0
        own, theirs = (item.residual[both].clamp(min=_FINEST).log().mean() for item in (self, other))
        difference = float(own - theirs)
        if abs(difference) < _SAME_RESIDUAL:
            difference = 0.0
        count = max(self.num_values, other.num_values) / DEPENDENT
        fitted = (self.hypothesis.freedom - other.hypothesis.freedom) / 2 * math.log(max(count, math.e))
        return count * difference + fitted


def distance(first: Trial, second: Trial) -> float:
    """Return the median distance of what two hypotheses give, relative to the row."""
    one, other = first.hypothesis.output, second.hypothesis.output
    return float(((one - other).norm(dim=1) / one.norm(dim=1)).nan_to_num().median())
