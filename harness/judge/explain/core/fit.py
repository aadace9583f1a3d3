"""One number fitted to rows: a scale, a base, a cap, a factor of a parameter."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

_NUM_NARROWED, _SHRINK = 40, 0.6
"""Steps of a search, and the share of the width that each leaves: 1e-9 of it in the end."""
_MAX_STEPS, _NEAR_ENOUGH, _SMALL = 12, 1e-8, 1e-4
"""Steps of Gauss-Newton, the step that ends them, and the distance over which a slope is taken."""

_NEAR_ONE, _ALIKE = 1.01, 0.25
"""Factor that shows what depends on a number; share of the error's energy that lies that way, for it to be fitted."""
_FEW_CALLS, _LEFT = 6, 0.5
"""Rows that are computed before the best of them must have come nearer, and the share of the error that they leave."""


def fit_by_search(grid: Sequence[float], error: Callable[[float], float]) -> float:
    """Return the positive number with the smallest error: the best one of a geometric grid, refined."""
    error = cache(error)
    at, ratio = min(grid, key=error), grid[1] / grid[0]
    for _ in range(_NUM_NARROWED):
        ratio **= _SHRINK
        at = min((at / ratio, at, at * ratio), key=error)
    return at


def fit_by_steps(
    actual: torch.Tensor, under: Callable[[float], torch.Tensor | None], start: float = 0.0
) -> float | None:
    """Return the number under which rows come nearest to `actual` (Gauss-Newton); None if they do not follow it.

    Args:
        actual: [R, W].
        under: returns the rows [R, W] under a number; None if there are none.
        start: where the steps begin, which are 1 at most.
    """
    at = start
    for _ in range(_MAX_STEPS):
        here, there = under(at), under(at + _SMALL)
        if here is None or there is None or torch.equal(here, there) or not bool(here.isfinite().all()):
            return None
        slope = (there - here) / _SMALL
        step = float(((actual - here) * slope).sum() / slope.square().sum())
        at += max(-1.0, min(1.0, step))
        if abs(step) < _NEAR_ENOUGH:
            break
    return at


def fit_factor(actual: torch.Tensor, under: Callable[[float], torch.Tensor | None], start: float) -> float | None:
    """Return a positive number as `fit_by_steps` does, by steps of its logarithm."""
    logarithm = fit_by_steps(actual, lambda at: under(math.exp(at)), math.log(start))
    return None if logarithm is None else math.exp(logarithm)


def fit_factor_near_one(
    actual: torch.Tensor, right: torch.Tensor, under: Callable[[float], torch.Tensor | None]
) -> float | None:
    """Return the factor under which rows come nearest to `actual`; None if they are off in another way.

    Args:
        actual: [R, W].
        right: [R, W], the rows under a factor of 1.
        under: returns the rows [R, W] under a factor; None if there are none.
    """
    near = under(_NEAR_ONE)
    if near is None or torch.equal(near, right):
        return None
    error, slope = actual - right, near - right
    if float((error * slope).sum()) ** 2 < _ALIKE * float(error.square().sum() * slope.square().sum()):
        return None
    left = list[float]()

    def nearer(factor: float) -> torch.Tensor | None:
        rows = None if len(left) >= _FEW_CALLS and min(left) > _LEFT else under(factor)
        left.append(math.inf if rows is None else float((actual - rows).norm() / error.norm()))
        return rows

    return fit_factor(actual, nearer, 1.0)
