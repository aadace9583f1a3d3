"""Many results of one operation as one: over the schedules of a check, or over the layers of a model.

Counts are summed, errors are the largest, medians are the median of the medians weighted by rows, and the verdict,
the worst row and what belongs to it are those of the worst part. NaN is the largest error there is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness.results.check import Coverage, RunResult, TapResult, TokenResult


def merge_taps(runs: Iterable[RunResult]) -> tuple[TapResult, ...]:
    """Return every tap of the runs once, in the order of the first run that has it."""
    by_name: dict[str, list[TapResult]] = {}
    for run in runs:
        for tap in run.taps:
            by_name.setdefault(tap.name, []).append(tap)
    return tuple(merge(taps) for taps in by_name.values())


def merge(taps: Sequence[TapResult]) -> TapResult:
    """Return one result that stands for all of `taps`, named as the worst of them."""
    worst = max(taps, key=severity)
    # The cache's exact zeros say nothing of the operations it may be folded with.
    computed = [tap for tap in taps if tap.judged_by != "cache"] or taps
    return replace(
        worst,
        num_rows=sum(tap.num_rows for tap in taps),
        local_roundings_median=_median((tap.local_roundings_median, tap.num_rows) for tap in computed),
        local_roundings_p99=largest(tap.local_roundings_p99 for tap in computed),
        local_roundings_max=largest(tap.local_roundings_max for tap in computed),
        local_bound_share_max=largest(tap.local_bound_share_max for tap in computed),
        control_roundings_max=largest(tap.control_roundings_max for tap in computed),
        control_bound_share_max=largest(tap.control_bound_share_max for tap in computed),
        propagated_relative_l2_max=largest(tap.propagated_relative_l2_max for tap in taps),
        propagated_ratio_median=_median((tap.propagated_ratio_median, tap.num_rows) for tap in taps),
        propagated_ratio_max=largest(tap.propagated_ratio_max for tap in taps),
        max_abs=largest(tap.max_abs for tap in taps),
        cosine_min=smallest(tap.cosine_min for tap in taps),
        sqnr_db_min=smallest(tap.sqnr_db_min for tap in taps),
        max_ulp=largest(tap.max_ulp for tap in taps),
        num_nan=sum(tap.num_nan for tap in taps),
        num_inf=sum(tap.num_inf for tap in taps),
        num_bad_rows=sum(tap.num_bad_rows for tap in taps),
    )


def severity(tap: TapResult) -> tuple[int, float, float]:
    """Return a key that sorts taps from the best to the worst."""
    share, ratio = tap.local_bound_share_max, tap.propagated_ratio_max
    return tap.verdict.severity, _nan_last(share or 0.0), _nan_last(ratio or 0.0)


def sum_tokens(runs: Sequence[RunResult]) -> TokenResult:
    """Return the token counts of all runs together."""
    return TokenResult(
        compared=sum(run.tokens.compared for run in runs),
        equal=sum(run.tokens.equal for run in runs),
        ties=sum(run.tokens.ties for run in runs),
    )


def sum_coverage(runs: Sequence[RunResult]) -> Coverage:
    """Return the coverage of all runs together; names appear once, in order of first appearance."""

    def union(field: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for run in runs for name in getattr(run.coverage, field)))

    return Coverage(
        expected=sum(run.coverage.expected for run in runs),
        recorded=sum(run.coverage.recorded for run in runs),
        missing=sum(run.coverage.missing for run in runs),
        missing_taps=union("missing_taps"),
        not_offered=union("not_offered"),
        triggers=union("triggers"),
        only_through=union("only_through"),
        not_judged=union("not_judged"),
        judged_compute=smallest(run.coverage.judged_compute for run in runs),
    )


def sum_seconds(seconds: Sequence[float | None]) -> float | None:
    """Return the sum of what was measured, None if nothing was."""
    measured = [value for value in seconds if value is not None]
    return sum(measured) if measured else None


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value, NaN if one is NaN, None if none was measured."""
    measured = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, measured)) else max(measured, default=None)


def smallest(values: Iterable[float | None]) -> float | None:
    """Return the smallest value, NaN if one is NaN, None if none was measured."""
    measured = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, measured)) else min(measured, default=None)


def _median(weighted: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the upper weighted median of (value, weight)."""
    measured = [(value, weight) for value, weight in weighted if value is not None]
    measured.sort(key=lambda pair: _nan_last(pair[0]))
    half, seen = sum(weight for _, weight in measured) / 2, 0
    for value, weight in measured:
        seen += weight
        if seen > half:
            return value
    return measured[-1][0] if measured else None


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
