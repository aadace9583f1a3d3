"""Is one step slower than another? Interleaved pairs, the ratio of each, and an interval of the ratios' median.

A wall time alone says nothing on a machine that others use too. Two steps timed in turn, A B B A, see the same
background load: what drifts linearly hits both alike, and the A of one block over those of the next show how much
noise is left. Not one A of a block over its other: the first follows an A and the last a B, which has taken the
caches.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.results.gate import Interval, PairedRatio

MIN_BLOCKS = 5
"""Below it the interval of a median says nothing."""
_NUM_RESAMPLES = 2000
CONFIDENCE = 0.99
_SEED = 0

Time = Callable[[], float]
"""Runs a step once and returns the seconds it took."""


def time_pairs(before: Time, after: Time, *, num_blocks: int = 30, tolerance: float = 0.03) -> PairedRatio:
    """Time two steps in turn, each warmed up once, and return their ratio.

    There are at least 5 blocks A B B A; a slowdown of `tolerance` is worth an alarm.
    """
    before(), after()
    blocks = [(before(), after(), after(), before()) for _ in range(num_blocks)]
    return paired_ratio(blocks, tolerance=tolerance)


def paired_ratio(
    blocks: Sequence[tuple[float, float, float, float]], *, tolerance: float = 0.03, groups: Sequence[int] | None = None
) -> PairedRatio:
    """Return the ratio that blocks of seconds, each A B B A, amount to.

    Blocks are in order of time; a slowdown of `tolerance` is worth an alarm. `groups` says of each block the pair of
    processes it was timed in; None: one for all. What differs between pairs of processes widens the interval.

    Raises:
        ValueError: fewer than 5 blocks.
    """
    if len(blocks) < MIN_BLOCKS:
        raise ValueError(f"{len(blocks)} blocks are too few for an interval: at least {MIN_BLOCKS}")
    first, second, third, fourth = np.array(blocks, np.float64).T
    before, after = first + fourth, second + third
    group = np.zeros(len(blocks), np.int64) if groups is None else np.array(groups, np.int64)
    is_neighbour = group[:-1] == group[1:]
    return PairedRatio(
        ratio=_interval(after / before, group),
        noise=_interval((before[:-1] / before[1:])[is_neighbour], group[1:][is_neighbour]),
        num_blocks=len(blocks),
        tolerance=tolerance,
    )


def _interval(ratios: NDArray[np.float64], group: NDArray[np.int64]) -> Interval:
    """Return the median with its bootstrap interval (Efron 1979, percentiles); the same ratios give the same one.

    Of several groups it is the geometric mean of their medians, which needs two thirds of the groups that a median of
    them would need. Groups are drawn first, and ratios within each of them then.
    """
    draw = np.random.default_rng(_SEED)
    names, sizes = np.unique(group, return_counts=True)
    members = np.full((len(names), sizes.max()), np.nan)  # what a smaller group lacks is left out
    for row, name in zip(members, names, strict=True):
        row[: np.count_nonzero(group == name)] = np.log(ratios[group == name])
    drawn = draw.integers(0, len(names), (_NUM_RESAMPLES, len(names), 1))
    within = draw.random((_NUM_RESAMPLES, len(names), sizes.max()))
    resampled = np.where(
        np.arange(sizes.max()) < sizes[drawn], members[drawn, (within * sizes[drawn]).astype(np.int64)], np.nan
    )
    means = np.nanmedian(resampled, axis=2).mean(axis=1)
    low, high = np.exp(np.quantile(means, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)))
    return Interval(median=float(np.exp(np.nanmedian(members, axis=1).mean())), low=float(low), high=float(high))
