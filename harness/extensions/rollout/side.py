"""One side against the truth: the causes that explain its column, found one after the other, the largest first.

A side with a cause is predicted by the truth, and by HF in the side's dtype: what rounds or chooses (a cache in eight
bits, a router) does so at values that have their own rounding, which the truth has not. The nearer of both counts. A
cause is named if it brings the prediction nearer by a share and on many tokens; nothing else is.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from harness.extensions.rollout.forward import Arithmetic, Forwards
from harness.extensions.rollout.setting import GapCause, PutBack, Setting, TermKind

_MOST_CAUSES = 4
_LEAST_SHARE, _LEAST_SHARE_INSIDE = 0.8, 0.5
"""Share of the errors that is left with a cause, at most: of a side outside of its floor, and of one inside."""
_STRONG_SHARE = 0.3
"""The same of a cause that is named though something else is left outside of the floor."""
_LEAST_Z = 3.0
"""The gain must be so many standard deviations of its sum over tokens, or lead from outside of the floor to inside."""
_FIT_COST = 10.0
"""By how much the gain of a cause with a fitted number must be above that of any other, nats."""
_LEAST_REST = 0.05
"""RMS of a side from its prediction, in units of the floor, from which on causes are looked for."""
_RMS_BOUND, _RMS_PER_ROOT, _MAX_BOUND = 1.5, 4.0, 20.0
_MEDIAN_BOUND, _MEDIAN_PER_ROOT = 1.0, 3.0
"""Of a sound side's errors in units of the floor; what is per root is over the root of the tokens.

Measured: reports/cpu/rollouts.md."""
_ORDER = list(TermKind)
_LEAST = 1e-12
_MOST_PLACES = 5
"""Decimal places with which a column may be written."""
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
    known: list[GapCause] = field(default_factory=list)
    """Causes that are seen and need no search: its own weights, its own experts."""
    values: PutBack | None = None
    """What it computes, if it is at hand."""
    causes: list[GapCause] = field(default_factory=list)
    """What explains it, in the order of `TermKind`."""
    unlike: str | None = None
    """Of a module at hand, a tensor that is not the model's in name or shape: its weights and operations are unseen."""
    follows_control: bool = False
    """Whether HF in the side's dtype predicts it better than the truth."""

    def setting(self, causes: Sequence[GapCause] | None = None) -> Setting:
        """Return the setting with causes, by default with those that explain it."""
        setting = self.base
        for cause in self.causes if causes is None else causes:
            setting = cause.added_to(setting)
        return setting

    def steps(self, forwards: Forwards) -> list[torch.Tensor]:
        """Return what each of its causes does to the log probabilities, [compared] each."""
        columns = [self.predicted(forwards, self.causes[:at]) for at in range(len(self.causes) + 1)]
        return [after - before for before, after in pairwise(columns)]

    def predicted(self, forwards: Forwards, causes: Sequence[GapCause]) -> torch.Tensor:
        """Return the log probabilities that causes give, by what predicts the side better, [compared].

        Of a column that is shifted, the values at its ends are no token's of the response: whatever they are is given.
        """
        setting = self.setting(causes)
        logprobs = (forwards.control if self.follows_control else forwards.truth)(setting)
        return torch.where(forwards.places.is_end(setting.shift), self.column, logprobs)

    def rest(self, forwards: Forwards) -> torch.Tensor:
        """Return what its causes leave of its distance from the truth, [compared]."""
        return self.column - forwards.truth(self.base) - sum(self.steps(forwards), torch.zeros_like(self.column))

    def floor(self, forwards: Forwards) -> torch.Tensor:
        """Return what rounding gives in its rest, [compared]; steps of the control leave that of the base in it."""
        settings = [self.setting(), *([self.base] if self.follows_control else [])]
        noise = torch.stack([forwards.sound_noise(setting) for setting in settings]).amax(dim=0)
        return torch.hypot(noise, self.resolution)


def is_outside(error: torch.Tensor, floor: torch.Tensor) -> bool:
    """Return whether errors are larger than rounding gives, [compared] both; what is not finite is outside.

    Each token's error is read in units of its own floor: a few tokens have most of the nats, and a fault may show in
    the others alone. RMS, largest and median are held each by itself.
    """
    units, root = (error / floor).abs(), math.sqrt(len(error))
    if not bool(error.isfinite().all() and floor.isfinite().all()):
        return True
    return (
        rms(units) > _RMS_BOUND + _RMS_PER_ROOT / root
        or float(units.max()) > _MAX_BOUND
        or float(units.median()) > _MEDIAN_BOUND + _MEDIAN_PER_ROOT / root
    )


def rms(x: torch.Tensor) -> float:
    """Return the root mean square."""
    return float(x.square().mean().sqrt())


def floor_of(side: Side, forwards: Forwards, setting: Setting) -> torch.Tensor:
    """Return what rounding gives a side under a setting, [compared]: of the control alone.

    Causes are looked for with it: one that is as small as another sound run's rounding is known by its direction.
    """
    return torch.hypot(forwards.noise(setting), side.resolution)


def explain(side: Side, forwards: Forwards, candidates: Sequence[GapCause], meanings: Sequence[GapCause]) -> None:
    """Find the causes of a side's distance from the truth."""
    side.causes = list(side.known)
    while len(side.causes) < _MOST_CAUSES and (
        rms(_nearest(side, forwards, side.setting()) / floor_of(side, forwards, side.setting())) > _LEAST_REST
    ):
        causes = _best(side, forwards, _longer(side, forwards, candidates, meanings))
        if not _is_strong(side, forwards, side.causes, causes) and _is_outside(side, forwards):
            both = _best(side, forwards, _longer(side, forwards, candidates, meanings, is_by_two=True))
            causes = both if _is_strong(side, forwards, side.causes, both) else causes
        if causes is None:
            break
        side.causes = causes
    _drop_partial(side, forwards)
    side.causes.sort(key=lambda cause: _ORDER.index(cause.kind))
    floor = floor_of(side, forwards, side.setting())
    truth, control = (rms((side.column - run(side.setting())) / floor) for run in (forwards.truth, forwards.control))
    side.follows_control = side.values is None and control < truth


def possible_meanings(side: Side, forwards: Forwards, meanings: Sequence[GapCause]) -> list[GapCause]:
    """Return the meanings that a side's log probabilities may have.

    Of a side at hand, these are the ones under which its own logits give its column better than they do without a
    cause: a wrong norm before the head has the effect of a temperature, but is an operation.
    """
    if side.values is None:
        return list(meanings)
    recorded = replace(side.base, cut=side.values)
    forwards.prepare(recorded, [meaning.change["meaning"] for meaning in meanings])

    def error(setting: Setting) -> float:
        columns = [forwards.truth(replace(setting, shift=shift)) for shift in (0, 1, -1)]
        return min(rms(torch.where(column.isfinite(), side.column - column, _FAR)) for column in columns)

    least = error(recorded)
    return [meaning for meaning in meanings if error(meaning.added_to(recorded)) < least]


def _longer(
    side: Side,
    forwards: Forwards,
    candidates: Sequence[GapCause],
    meanings: Sequence[GapCause],
    *,
    is_by_two: bool = False,
) -> Iterator[list[GapCause]]:
    """Yield a side's causes and one more, or one more with a meaning or a shift: both may fit, and neither alone.

    A meaning that was found is chosen again: without the other cause, it fitted that, too.
    """
    fixed = [cause for cause in side.causes if cause.kind is not TermKind.MEANING]
    longer = [[*fixed, item] for item in _open(candidates, fixed)]
    if is_by_two or len(fixed) < len(side.causes):
        yield from _with_meanings(side, forwards, longer, meanings)
        shifts = [cause for cause in _open(candidates, fixed) if cause.kind is TermKind.ALIGNMENT]
        yield from ([*causes, shift] for causes in longer for shift in shifts if causes[-1].kind is not shift.kind)
    else:
        yield from longer
        yield from _with_meanings(side, forwards, [fixed], meanings)


def _with_meanings(
    side: Side, forwards: Forwards, several: Sequence[list[GapCause]], meanings: Sequence[GapCause]
) -> Iterator[list[GapCause]]:
    """Yield each of several lists of causes with each meaning; one forward is run for all meanings."""
    for causes in several:
        forwards.prepare(side.setting(causes), [meaning.change["meaning"] for meaning in meanings])
        yield from ([*causes, meaning] for meaning in meanings)


def _open(candidates: Sequence[GapCause], causes: Sequence[GapCause]) -> list[GapCause]:
    """Return the causes that may come to those found: one of a kind, but several tensors."""
    names, kinds = {item.detail for item in causes}, {item.kind for item in causes} - {TermKind.WEIGHTS}
    return [cause for cause in candidates if cause.detail not in names and cause.kind not in kinds]


def _drop_partial(side: Side, forwards: Forwards) -> None:
    """Drop causes that explain a part, where the whole is not explained: many a thing lies in a temperature's way."""
    for cause in [cause for cause in reversed(side.causes) if cause not in side.known]:
        others = [item for item in side.causes if item is not cause]
        if _is_outside(side, forwards) and not _is_strong(side, forwards, others, side.causes):
            side.causes = others


def _is_outside(side: Side, forwards: Forwards) -> bool:
    return is_outside(_nearest(side, forwards, side.setting()), floor_of(side, forwards, side.setting()))


def _nearest(side: Side, forwards: Forwards, setting: Setting) -> torch.Tensor:
    """Return the errors of the better prediction under a setting, [compared]."""
    floor = _yardstick(side, forwards, setting)
    rests = [side.column - run(setting) for run in (forwards.truth, forwards.control)]
    return min((torch.where(rest.isfinite(), rest, _FAR) for rest in rests), key=lambda rest: rms(rest / floor))


def _yardstick(side: Side, forwards: Forwards, setting: Setting) -> torch.Tensor:
    """Return what rounding gives under a setting, [compared], if its logits are off as those without a cause are.

    A cause that rounds by itself, a cache in eight bits, is no excuse for what is left with it.
    """
    base = forwards.noise(side.base)
    floor = forwards.deviation((side.base, Arithmetic.CONTROL), (side.base, Arithmetic.TRUTH), setting)
    return torch.hypot(torch.fmax(floor, base.min()), side.resolution)


def _errors(
    side: Side, forwards: Forwards, before: Sequence[GapCause], after: Sequence[GapCause]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors with some causes and with others, [compared] each, in units of both settings' rounding."""
    settings = [side.setting(causes) for causes in (before, after)]
    floor = torch.hypot(*(_yardstick(side, forwards, setting) for setting in settings))
    rest, left = (_nearest(side, forwards, setting) / floor for setting in settings)
    return rest, left


def gain(side: Side, forwards: Forwards, before: Sequence[GapCause], after: Sequence[GapCause]) -> torch.Tensor:
    """Return how much likelier a column is with some causes than with others, [compared] nats.

    Errors of rounding have long tails (a router that chooses otherwise), so that they are taken to be Cauchy's: no
    single token decides.
    """
    rest, left = _errors(side, forwards, before, after)
    return torch.log1p(rest.square()) - torch.log1p(left.square())


def _best(side: Side, forwards: Forwards, candidates: Iterable[list[GapCause]]) -> list[GapCause] | None:
    """Return the causes that gain most, if they bring the side nearer; a fitted number has a cost."""
    gains = [
        (float(gain(side, forwards, side.causes, causes).sum()) - _FIT_COST * _is_fitted(causes), causes)
        for causes in candidates
    ]
    ranked = [causes for _, causes in sorted(gains, key=lambda pair: -pair[0])]
    best = {_is_fitted(causes): causes for causes in reversed(ranked)}.values()
    return next((causes for causes in ranked if causes in best and _is_better(side, forwards, causes)), None)


def _is_fitted(causes: Sequence[GapCause]) -> bool:
    return any(cause.is_fitted for cause in causes)


def _is_strong(side: Side, forwards: Forwards, before: Sequence[GapCause], after: Sequence[GapCause] | None) -> bool:
    """Whether causes take away most of what others leave."""
    return after is not None and _share_left(*_errors(side, forwards, before, after)) <= _STRONG_SHARE


def _share_left(rest: torch.Tensor, left: torch.Tensor) -> float:
    """Return what share of errors is left: of their RMS, or of their unlikeliness, in which no few tokens decide."""
    unlikeliness = [float(torch.log1p(item.square()).sum()) for item in (rest, left)]
    return min(rms(left) / max(rms(rest), _LEAST), unlikeliness[1] / max(unlikeliness[0], _LEAST))


def _is_better(side: Side, forwards: Forwards, causes: Sequence[GapCause]) -> bool:
    """Whether the errors fall by a share, and on many tokens or to the floor."""
    was_outside, is_still = (
        is_outside(side.column - forwards.truth(setting), floor_of(side, forwards, setting))
        for setting in (side.setting(), side.setting(causes))
    )
    rest, left = _errors(side, forwards, side.causes, causes)
    if was_outside and _share_left(rest, left) > _LEAST_SHARE:
        return False
    if not was_outside and rms(left) > _LEAST_SHARE_INSIDE * rms(rest):
        return False
    gains = gain(side, forwards, side.causes, causes)
    is_on_many = float(gains.sum()) > _LEAST_Z * float(gains.square().sum().sqrt())
    return is_on_many or (was_outside and not is_still)


def decimal_places(column: torch.Tensor) -> int | None:
    """Return with how few decimal places all values of a column are exact; None if they are more than five."""
    values = [value for value in column.tolist() if value]
    places = (places for places in range(1, _MOST_PLACES + 1) if all(round(item, places) == item for item in values))
    return next(places, None) if values else None


def resolution(column: torch.Tensor) -> torch.Tensor:
    """Return the largest rounding error of each value of a column, both [compared] float64."""
    places = decimal_places(column)
    if places is not None:
        return torch.full_like(column, 0.5 * 10.0**-places)
    if torch.equal(column.to(torch.bfloat16).to(column.dtype), column):
        return column.abs() * torch.finfo(torch.bfloat16).eps / 2
    return torch.zeros_like(column)
