"""The output of attention over all rows of a failure, and a number fitted to some of them."""

import math
from collections.abc import Callable, Iterator

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.core.failure import Failure

_STEPS, _STEP = 32, 1 / 8
"""Places on each side of the start that are tried first, and their distance on the logarithmic scale."""


def joined(failure: Failure, attend: Callable[[AttentionContext], torch.Tensor]) -> torch.Tensor:
    """Return what `attend` gives of each view [T, N*H], over all views: [R, N*H]."""
    return torch.cat([attend(view) for view in failure.views])


def rows_of(failure: Failure, view: AttentionContext) -> torch.Tensor:
    """Return the numbers of a view's rows among the failure's, [T] int64."""
    begin = 0
    for item in failure.views:
        if item is view:
            return torch.arange(begin, begin + len(item.rows))
        begin += len(item.rows)
    raise ValueError("the view is not of this failure")


def single_rows(failure: Failure) -> Iterator[AttentionContext]:
    """Yield a view of each row of a failure by itself, in their order."""
    for view in failure.views:
        yield from (view.select(torch.tensor([at])) for at in range(len(view.rows)))


def fitted_factor(start: float, error: Callable[[float], float]) -> float:
    """Return the positive number with the smallest error, by a search over its logarithm."""

    def at_logarithm(logarithm: float) -> float:
        return error(math.exp(logarithm))

    grid = [math.log(start) + step * _STEP for step in range(-_STEPS, _STEPS + 1)]
    at, width = min(grid, key=at_logarithm), _STEP
    for _ in range(50):
        width *= 0.65
        at = min((at - width, at, at + width), key=at_logarithm)
    return math.exp(at)
