"""Causes of errors that have a common direction, where no row is out of bounds (H087).

Each row holds mostly rounding, so that no row tells a cause. All of them together do: the errors against what a cause
would give are smaller than against the truth, by more than chance, and have that direction no more. How much likelier
the rows are under a cause is the logarithm of the odds of two Gaussian fits, as in the trial of wrong rows.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch

from harness.base.metrics import rounding_unit
from harness.judge.compare.evidence import guarded
from harness.judge.compare.systematic import Effects
from harness.judge.explain.causes import causes_of
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.trial.ranking import CLEARLY, DEPENDENT, NO_CAUSE, with_failures
from harness.results.check import Effect, Explanation

_LEAST_ODDS = 10.0
"""Natural logarithm of the odds that a cause needs: many are tried."""
_LEFT = 0.25
"""Share of the effect that may be left under its cause."""
_MAX_EQUAL = 3


@dataclass(frozen=True, slots=True)
class _Fit:
    """One hypothesis and what it does to the errors of the rows."""

    hypothesis: Hypothesis
    odds: float
    """Natural logarithm."""
    roundings: torch.Tensor
    """[R] what is left."""


def explain_direction(wrong: WrongOperation, effect: Effect) -> Explanation:
    """Return the cause under which the rows are likeliest; one that says so where none takes the direction away."""
    before, failures = _roundings(wrong, wrong.expected), list[str]()
    fits = sorted(_fits(wrong, effect, before, failures), key=lambda fit: -fit.odds)
    if not fits:
        return with_failures(_explanation(wrong, before, None, (), NO_CAUSE), failures)
    best = fits[0]
    equal = {fit.hypothesis.cause: fit for fit in fits if fit.odds > best.odds - CLEARLY}
    shown = ", or ".join(list(equal)[:_MAX_EQUAL])
    more = f", or {len(equal) - _MAX_EQUAL} others" if len(equal) > _MAX_EQUAL else ""
    return with_failures(_explanation(wrong, before, best, list(equal.values()), shown + more), failures)


def _fits(wrong: WrongOperation, effect: Effect, before: torch.Tensor, failures: list[str]) -> list[_Fit]:
    fits = []
    for explain in causes_of(wrong.operation.kind):
        with guarded(explain.__name__, failures):
            for hypothesis in explain(wrong):
                fit = _fit(wrong, effect, before, hypothesis)
                if fit is not None:
                    fits.append(fit)
    return fits


def _fit(wrong: WrongOperation, effect: Effect, before: torch.Tensor, hypothesis: Hypothesis) -> _Fit | None:
    """Return how well a hypothesis does; None if the direction stays, or the rows are not clearly likelier."""
    if hypothesis.output.shape != wrong.actual.shape or not bool(hypothesis.output.isfinite().all()):
        return None
    after = _roundings(wrong, hypothesis.output)
    num_values = wrong.actual.numel() / DEPENDENT
    least = torch.finfo(torch.float64).tiny
    ratio = float(before.square().sum().clamp(min=least) / after.square().sum().clamp(min=least))
    odds = num_values / 2 * math.log(ratio) - hypothesis.num_fitted / 2 * math.log(num_values)
    if odds < _LEAST_ODDS or _is_left(wrong, effect, hypothesis.output):
        return None
    return _Fit(hypothesis, odds, after)


def _is_left(wrong: WrongOperation, effect: Effect, output: torch.Tensor) -> bool:
    """Whether the errors against what a cause gives have the direction still."""
    shape = wrong.operation.shape
    effects = Effects(wrong.operation.kind, wrong.dtype, num_heads=shape[0] if len(shape) == 2 else 1)
    effects.add(wrong.positions, wrong.actual, output, torch.ones(len(output), dtype=torch.bool))
    left = effects.like(effect)
    return left is not None and abs(left.size) > _LEFT * abs(effect.size)


def _roundings(wrong: WrongOperation, output: torch.Tensor) -> torch.Tensor:
    norm = wrong.expected.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    return cast(torch.Tensor, (wrong.actual - output).norm(dim=1) / norm / rounding_unit(wrong.dtype))


def _explanation(
    wrong: WrongOperation, before: torch.Tensor, best: _Fit | None, equal: list[_Fit] | tuple[()], cause: str
) -> Explanation:
    if best is None:
        detail = "none of them takes the direction away; a run in float32 shows more"
    else:
        told = "these rows cannot tell them apart: a run in float32 would" if len(equal) > 1 else ""
        detail = "; ".join(text for text in (best.hypothesis.detail, told) if text)
    return Explanation(
        cause=cause,
        scope="all rows together",
        residual_before=float(before.median()),
        residual_after=None if best is None else float(best.roundings.median()),
        num_rows=len(before),
        num_explained=0 if best is None else int((best.roundings < before).sum()),
        num_fitted=0 if best is None else best.hypothesis.num_fitted,
        is_cause=best is not None and best.hypothesis.is_cause,
        detail=detail,
    )
