"""Many results of one operation as one: over the schedules of a check, or over the layers of a model.

The rule of each field stands beside it, in `harness.results.check`.
"""

import math
from collections.abc import Iterable, Sequence

from harness.results.check import Coverage, RunResult, TapResult, TokenResult
from harness.results.merging import merged


def merge_taps(runs: Iterable[RunResult]) -> tuple[TapResult, ...]:
    """Return every tap of the runs once, in the order of the first run that has it."""
    by_name: dict[str, list[TapResult]] = {}
    for run in runs:
        for tap in run.taps:
            by_name.setdefault(tap.name, []).append(tap)
    return tuple(merge(taps) for taps in by_name.values())


def merge(taps: Sequence[TapResult]) -> TapResult:
    """Return one result that stands for all of `taps`, named as the worst of them."""
    return merged(taps, worst=max(taps, key=severity))


def severity(tap: TapResult) -> tuple[int, float, float]:
    """Return a key that sorts taps from the best to the worst."""
    share, ratio = tap.local_bound_share_max, tap.propagated_ratio_max
    return tap.verdict.severity, _nan_last(share or 0.0), _nan_last(ratio or 0.0)


def sum_tokens(runs: Sequence[RunResult]) -> TokenResult:
    """Return the token counts of all runs together."""
    return merged([run.tokens for run in runs], worst=TokenResult())


def sum_coverage(runs: Sequence[RunResult]) -> Coverage:
    """Return the coverage of all runs together; names appear once, in order of first appearance."""
    return merged([run.coverage for run in runs], worst=Coverage())


def sum_seconds(seconds: Sequence[float | None]) -> float | None:
    """Return the sum of what was measured, None if nothing was."""
    measured = [value for value in seconds if value is not None]
    return sum(measured) if measured else None


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
