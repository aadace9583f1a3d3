"""Statistics of an operation of which no single row is out of bounds: one a file.

A new one is a member of `Verdict`, a code, a file here, and an entry of `STATISTICS`.
"""

from harness.judge.compare.local_judge import LocalErrors
from harness.judge.compare.statistics.direction import direction
from harness.judge.compare.statistics.entry import Departure, Statistic

__all__ = ["STATISTICS", "Departure", "Statistic", "departure_of"]

STATISTICS: tuple[Statistic, ...] = (direction,)
"""In the order in which they are asked."""


def departure_of(errors: LocalErrors) -> Departure | None:
    """Return what the first statistic says that finds something."""
    return next((found for statistic in STATISTICS if (found := statistic(errors)) is not None), None)
