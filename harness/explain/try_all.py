"""The trial: every explanation of an operation's kind against the wrong rows, and the one that fits best.

An explanation holds for a row if the row's error against what it would give falls to the rounding floor: to twice the
row's own bound at most (under the cause other roundings may be made, and one even where none is allowed), and to half
of the error at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.explain import attention, cache, embedding, generic, linear, mlp, norm, residual, rotary
from harness.explain.attention_place import wrong_place
from harness.explain.attention_table import cache_played_back, other_block_table, past_the_context, wrong_block
from harness.explain.attention_tensors import coarse_cache, other_tensors, read_back
from harness.explain.hypothesis import Hypothesis
from harness.explain.not_finite import not_finite
from harness.explain.pattern import pattern
from harness.explain.scene import Explain, Scene
from harness.metrics import rounding_unit
from harness.results import Explanation
from harness.taps import Kind

_HISTORY = (
    cache_played_back,
    other_block_table,
    other_tensors,
    coarse_cache,
    past_the_context,
    wrong_block,
    read_back,
    wrong_place,
)
"""What attention may read in the place of the request's own history."""

BY_KIND: Mapping[Kind, Sequence[Explain]] = {
    Kind.EMBEDDING: (*embedding.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.NORM: (*norm.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.LINEAR: (*linear.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.ROTARY: (*rotary.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.ADD: (*residual.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.ACTIVATION: (*mlp.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.ATTENTION: (*_HISTORY, *attention.EXPLANATIONS, *generic.EXPLANATIONS),
    Kind.CACHE: cache.EXPLANATIONS,
}
"""What is tried for an operation, the likelier first."""

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
    for explain in BY_KIND[scene.operation.kind]:
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
            detail=pattern(scene),
        )
    return _explanation(best, roundings, scope)


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
