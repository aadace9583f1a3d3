"""Errors that have a direction over all rows; compare/systematic.py measures it."""

from harness.errors import Code
from harness.judge.compare.local_judge import LocalErrors
from harness.judge.compare.statistics.entry import Departure
from harness.results.check import Verdict


def direction(errors: LocalErrors) -> Departure | None:
    """Say in words in which direction the rows are off."""
    effect = errors.effect
    if effect is None:
        return None
    what = f"{effect.kind} {effect.which}".strip()
    message = (
        f"has a {what} of {effect.size:+.3g} ({effect.low:+.3g} to {effect.high:+.3g} at 95 %), "
        f"{abs(effect.roundings):.2g} roundings, in {effect.num_rows} rows (t = {abs(effect.statistic):.3g}): "
        "rounding has no direction"
    )
    return Departure(verdict=Verdict.SYSTEMATIC, code=Code.SYSTEMATIC_ERROR, message=message)
