"""The trial: every explanation of an operation's kind against the wrong rows, and the one that fits best.

An explanation holds for a row if the row's error against what it would give falls to the rounding floor: to twice the
row's own bound at most (under the cause other roundings may be made, and one even where none is allowed), and to half
of the error at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from harness.explain.hypothesis import Hypothesis
from harness.explain.not_finite import not_finite
from harness.explain.pattern import pattern
from harness.explain.scene import Explain, Scene
from harness.metrics import rounding_unit
from harness.results import Explanation
from harness.taps import KINDS, Kind

NO_CAUSE = "no known way to get it wrong fits"
_FLOOR = 2.0
"""Times a row's own bound that its error may still be under the right cause."""
_FALL = 0.5
_MIN_SHARE = 0.5
"""Share of the rows that a cause must explain; below it, it is none."""
_WELL_EXPLAINED = 0.85


@dataclass(frozen=True, slots=True)
class _Trial:
    """One hypothesis and how it went."""

    hypothesis: Hypothesis
    residual: torch.Tensor
    """[R] roundings."""
    holds: torch.Tensor
    """[R] bool."""

    def is_perfect(self, bound: torch.Tensor) -> bool:
        """Whether nothing is left that another explanation could explain better."""
        return self.hypothesis.freedom == 0 and bool((self.holds & (self.residual <= bound)).all())

    def is_better_than(self, other: "_Trial") -> bool:
        """More rows explained; of about as many, with fewer fitted numbers; of these, by much the smaller error."""
        margin = max(1.0, 0.02 * len(self.holds))
        difference = int(self.holds.sum()) - int(other.holds.sum())
        if abs(difference) >= margin:
            return difference > 0
        if self.hypothesis.freedom != other.hypothesis.freedom:
            return self.hypothesis.freedom < other.hypothesis.freedom
        return _median(self.residual) < _FALL * _median(other.residual)


def try_all(scene: Scene, roundings: torch.Tensor, bound: torch.Tensor, scope: str) -> Explanation:
    """Return the explanation that fits the scene best; one that says so where none does.

    Args:
        scene: the wrong rows.
        roundings: [R] their errors against what they should be.
        bound: [R] the errors that rounding explains.
        scope: which rows are wrong, in words.
    """
    finite = scene.actual.isfinite().all(dim=1)
    if not bool(finite.all()):
        if bool(finite.any()):
            explanation = try_all(scene.select(finite), roundings[finite], bound[finite], scope)
            if explanation.residual_after is not None:
                return explanation
        return not_finite(scene, roundings, scope)
    best: _Trial | None = None
    for explain in causes_of(scene.operation.kind):
        for hypothesis in explain(scene):
            trial = _tried(hypothesis, scene, roundings, bound)
            if best is None or trial.is_better_than(best):
                best = trial
        if best is not None and best.is_perfect(bound):
            break
    if best is None or float(best.holds.float().mean()) < _MIN_SHARE:
        return Explanation(
            cause=NO_CAUSE,
            scope=scope,
            residual_before=_median(roundings),
            residual_after=None,
            num_rows=len(roundings),
            num_explained=0,
            is_cause=False,
            detail=pattern(scene),
        )
    return _explanation(best, roundings, scope)


def causes_of(kind: Kind) -> Sequence[Explain]:
    """Return what is tried for a kind of operation, the likelier first."""
    modules = [import_module(f"harness.explain.{name}") for name in KINDS[kind].causes]
    return [explain for module in modules for explain in module.EXPLANATIONS]


def _tried(hypothesis: Hypothesis, scene: Scene, roundings: torch.Tensor, bound: torch.Tensor) -> _Trial:
    error = (scene.actual - hypothesis.output).norm(dim=1)
    norm = hypothesis.output.norm(dim=1)
    residual = torch.where(error == 0, 0.0, error / norm / rounding_unit(scene.dtype)).nan_to_num(nan=torch.inf)
    holds = (residual <= _FLOOR * bound.clamp(min=1)) & (residual <= _FALL * roundings)
    unknown = hypothesis.unknown
    if unknown is not None and bool(holds[~unknown].any()) and bool(holds[~unknown].all()):
        holds = holds | unknown
    return _Trial(hypothesis, residual, holds)


def _explanation(trial: _Trial, roundings: torch.Tensor, scope: str) -> Explanation:
    hypothesis, share = trial.hypothesis, float(trial.holds.float().mean())
    detail = hypothesis.detail
    if share < _WELL_EXPLAINED:
        rest = "some rows have another cause"
        detail = f"{detail}; {rest}" if detail else rest
    return Explanation(
        cause=hypothesis.cause,
        scope=scope,
        residual_before=_median(roundings),
        residual_after=_median(trial.residual[trial.holds & _known(hypothesis)]),
        num_rows=len(roundings),
        num_explained=int(trial.holds.sum()),
        detail=detail,
        provenance=hypothesis.provenance() if hypothesis.provenance else None,
    )


def _known(hypothesis: Hypothesis) -> torch.Tensor:
    return torch.tensor(True) if hypothesis.unknown is None else ~hypothesis.unknown


def _median(values: torch.Tensor) -> float:
    return float(values.median())
