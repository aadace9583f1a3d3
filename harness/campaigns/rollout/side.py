"""One side against the truth: the causes that explain its column, found one after the other, the largest first.

A side with a cause is predicted by the truth, and by HF in the side's dtype: what rounds or chooses (a cache in eight
bits, a router) does so at values that have their own rounding, which the truth has not. The nearer of both counts. A
cause is named if it brings the prediction nearer by a share and on many tokens; nothing else is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from harness.campaigns.endpoint.judge import bounds
from harness.campaigns.rollout.causes import Cause
from harness.campaigns.rollout.forward import Forwards
from harness.campaigns.rollout.setting import Cut, Kind, Setting

_MOST_CAUSES = 4
_LEAST_GAIN, _LEAST_GAIN_INSIDE = 0.8, 0.5
"""RMS that is left with a cause, over that without, at most: of a side outside of its floor, and of one inside."""
_STRONG_GAIN = 0.3
"""The same of a cause that is named though something else is left outside of the floor."""
_LEAST_Z = 3.0
"""The squared errors must fall by so many standard deviations of their sum, or from outside of the floor to inside."""
_LEAST_REST = 0.05
"""RMS of a side from its prediction, over the floor's, from which on causes are looked for."""
_MEDIAN_BOUND, _MEDIAN_PER_ROOT = 1.5, 6.0
"""Median of a sound side's absolute errors over that of HF's, at most; the second over the root of the tokens.

Calibrated with harness/selfcheck/calibrations/rollout_pairs.py."""
_ORDER = list(Kind)
_FAR = 1e3
"""Nats, in the place of a value that is not finite."""


@dataclass(slots=True, kw_only=True)
class Side:
    """One side's column, and what is known of it."""

    name: str
    source: str
    column: torch.Tensor
    """[compared] float64: log probabilities."""
    resolution: torch.Tensor
    """[compared] float64: what the column's own digits leave open."""
    base: Setting
    """How the truth is run where nothing is wrong: with the experts of the log, if it has any."""
    known: list[Cause] = field(default_factory=list)
    """Causes that are seen and need no search: its own weights, its own experts."""
    values: Cut | None = None
    """What it computes, if it is at hand."""
    causes: list[Cause] = field(default_factory=list)
    """What explains it, in the order of `Kind`."""
    follows_control: bool = False
    """Whether HF in the side's dtype predicts it better than the truth."""

    def setting(self, num_causes: int | None = None) -> Setting:
        """Return the setting with its leading causes, all of them by default."""
        setting = self.base
        for cause in self.causes[:num_causes]:
            setting = cause.added_to(setting)
        return setting

    def steps(self, forwards: Forwards) -> list[torch.Tensor]:
        """Return what each of its causes does to the log probabilities, [compared] each."""
        run = forwards.control if self.follows_control else forwards.truth
        columns = [run(self.setting(at)) for at in range(len(self.causes) + 1)]
        return [after - before for before, after in pairwise(columns)]

    def rest(self, forwards: Forwards) -> torch.Tensor:
        """Return what its causes leave of its distance from the truth, [compared]."""
        return self.column - forwards.truth(self.base) - sum(self.steps(forwards), torch.zeros_like(self.column))

    def floor(self, forwards: Forwards) -> torch.Tensor:
        """Return what rounding gives in its rest, [compared]: of a side that HF in its dtype predicts, HF's own."""
        return floor_of(self, forwards, self.base if self.follows_control else self.setting())


def is_outside(error: torch.Tensor, floor: torch.Tensor) -> bool:
    """Return whether errors are larger than rounding gives, [compared] both.

    They are held by their RMS, by the largest and by the median. Where a few tokens have most of the floor's weight, a
    draw of each says little, so that these few are what is counted. What is not finite is outside.
    """
    if not bool(error.isfinite().all() and floor.isfinite().all()):
        return True
    rms_bound, max_bound = bounds(max(1, int(effective(floor))))
    median_bound = _MEDIAN_BOUND + _MEDIAN_PER_ROOT / math.sqrt(len(error))
    return (
        rms(error) > rms_bound * rms(floor)
        or largest(error) > max_bound * largest(floor)
        or median(error) > median_bound * median(floor)
    )


def effective(floor: torch.Tensor) -> float:
    """Return how many tokens have the weight of a floor."""
    squares = floor.square() / floor.square().max()
    return float(squares.sum() ** 2 / squares.square().sum())


def median(x: torch.Tensor) -> float:
    """Return the median absolute value."""
    return float(x.abs().median())


def rms(x: torch.Tensor) -> float:
    """Return the root mean square."""
    return float(x.square().mean().sqrt())


def largest(x: torch.Tensor) -> float:
    """Return the largest absolute value."""
    return float(x.abs().max())


def floor_of(side: Side, forwards: Forwards, setting: Setting) -> torch.Tensor:
    """Return what rounding gives a side under a setting, [compared]."""
    return (forwards.noise(setting).square() + side.resolution.square()).sqrt()


def explain(side: Side, forwards: Forwards, candidates: Sequence[Cause], meanings: Sequence[Cause]) -> None:
    """Find the causes of a side's distance from the truth."""
    side.causes = list(side.known)
    while len(side.causes) < _MOST_CAUSES and _leaves_something(side, forwards):
        others = [cause for cause in candidates if _is_open(cause, side.causes)]
        means = [cause for cause in meanings if _is_open(cause, side.causes)]
        found = _first_better(side, forwards, [[cause] for cause in (*others, *_prepared(side, forwards, [], means))])
        if not _is_strong(side, forwards, found) and _is_far(side, forwards):  # two at once may fit, and neither alone
            pairs = [[other, each] for other in others for each in _prepared(side, forwards, [other], means)]
            both = _first_better(side, forwards, pairs)
            found = both if _is_strong(side, forwards, both) else found
        if found is None:
            break
        side.causes += found
    _drop_partial(side, forwards)
    side.causes.sort(key=lambda cause: _ORDER.index(cause.kind))
    truth, control = (rms(side.column - run(side.setting())) for run in (forwards.truth, forwards.control))
    side.follows_control = side.values is None and control < truth


def _drop_partial(side: Side, forwards: Forwards) -> None:
    """Drop causes that explain a part, where the whole is not explained: many a thing lies in a temperature's way."""
    while len(side.causes) > len(side.known) and is_outside(
        nearest(side, forwards, side.setting()), floor_of(side, forwards, side.base)
    ):
        last = side.causes.pop()
        if _is_strong(side, forwards, [last]):
            side.causes.append(last)
            break


def _is_strong(side: Side, forwards: Forwards, causes: Sequence[Cause] | None) -> bool:
    """Whether causes that come to those found take away most of what they leave."""
    if causes is None:
        return False
    before, after = (rms(nearest(side, forwards, setting)) for setting in (side.setting(), _with(side, causes)))
    return after <= _STRONG_GAIN * before


def _prepared(side: Side, forwards: Forwards, causes: Sequence[Cause], meanings: Sequence[Cause]) -> Sequence[Cause]:
    """Return meanings, for all of which one forward was run with some causes."""
    if meanings:
        forwards.prepare(_with(side, causes), [cause.change["meaning"] for cause in meanings])
    return meanings


def _with(side: Side, causes: Sequence[Cause]) -> Setting:
    setting = side.setting()
    for cause in causes:
        setting = cause.added_to(setting)
    return setting


def _is_far(side: Side, forwards: Forwards) -> bool:
    setting = side.setting()
    return is_outside(side.column - forwards.truth(setting), floor_of(side, forwards, setting))


def _leaves_something(side: Side, forwards: Forwards) -> bool:
    """Whether a side is further from its prediction than what could be seen of a cause."""
    setting = side.setting()
    return rms(nearest(side, forwards, setting)) > _LEAST_REST * rms(floor_of(side, forwards, setting))


def _first_better(side: Side, forwards: Forwards, candidates: Sequence[list[Cause]]) -> list[Cause] | None:
    """Return the causes that leave least, if they bring the side nearer.

    Those with a fitted number come first only where they leave much less than any other.
    """
    left = [(rms(nearest(side, forwards, _with(side, causes))), at) for at, causes in enumerate(candidates)]
    plain, fitted = (
        min(((value, at) for value, at in left if any(each.is_fitted for each in candidates[at]) is is_fitted),
            default=(math.inf, -1))
        for is_fitted in (False, True)
    )  # fmt: skip
    ranked = [fitted, plain] if fitted[0] < _LEAST_GAIN * plain[0] else [plain, fitted]
    best = (candidates[at] for _, at in ranked if at >= 0)
    return next((causes for causes in best if _is_better(side, forwards, causes)), None)


def _is_open(cause: Cause, found: Sequence[Cause]) -> bool:
    """Whether a cause may come to those found: one of a kind, but several tensors."""
    names = {each.detail for each in found}
    return cause.detail not in names and (
        cause.kind is Kind.WEIGHTS or all(each.kind is not cause.kind for each in found)
    )


def nearest(side: Side, forwards: Forwards, setting: Setting) -> torch.Tensor:
    """Return the errors of the better prediction under a setting, [compared]."""
    rests = [side.column - run(setting) for run in (forwards.truth, forwards.control)]
    return min((torch.where(rest.isfinite(), rest, _FAR) for rest in rests), key=rms)


def _is_better(side: Side, forwards: Forwards, causes: Sequence[Cause]) -> bool:
    """Whether the errors fall by a share, and on many tokens or to the floor."""
    before, after = side.setting(), _with(side, causes)
    rest, left = (nearest(side, forwards, setting) for setting in (before, after))
    was_outside, is_still = (
        is_outside(side.column - forwards.truth(setting), floor_of(side, forwards, setting))
        for setting in (before, after)
    )
    if rms(left) > (_LEAST_GAIN if was_outside else _LEAST_GAIN_INSIDE) * rms(rest):
        return False
    fall = rest.square() - left.square()
    is_on_many = float(fall.sum()) > _LEAST_Z * float(fall.square().sum().sqrt())
    return is_on_many or (was_outside and not is_still)
