"""The trial: every explanation of an operation's kind against the wrong rows, and the one that fits best.

An explanation holds for a row if the row's error against what it would give falls to the rounding floor: to twice the
row's own bound at most (under the cause other roundings may be made, and one even where none is allowed), and to half
of the error at most. It is asserted if the rows that it holds for are enough for the numbers that were fitted to them,
and if no other cause fits as well: causes that the rows cannot tell apart are all said.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind
from harness.judge.compare.evidence import guarded
from harness.judge.explain.attention.unshown import unshown_attention
from harness.judge.explain.causes import stages_of
from harness.judge.explain.core.wrong_operation import ALLOWANCE, FALL, Explain, Hypothesis, WrongOperation, explained
from harness.judge.explain.trial.description import pattern
from harness.judge.explain.trial.not_finite import not_finite
from harness.judge.explain.trial.unrecorded import OF_UNRECORDED_ATTENTION, OF_UNSHOWN_ATTENTION, unrecorded_attention
from harness.results.check import Explanation

_FITTED_WELL = {Kind.ATTENTION: 3, Kind.ROTARY: 3}
"""Fitted numbers of a cause beside which nothing more general is tried: scales, bases, places of blocks. Of other kinds
of operation, changes of HF's code often say the same without a number."""
MIN_SHARE = 0.85
"""Share of the rows that a cause must explain; below it, the report says how many rows it fits, and asserts nothing."""
_VALUES_PER_NUMBER = 1.5
"""Independent values that each fitted number needs: with fewer, it would fit anything."""
_VALUES_NEAR_THE_BOUND = 10.0
"""The same where the error is near the bound: what is fitted there is fitted to rounding, too."""
_NEAR = 4.0
"""Times the bound up to which one row is too little: what rounding leaves of it could come out by chance."""
_FINEST = 0.5
"""Roundings below which one residual is as good as another."""
DEPENDENT = 4.0
"""Rounding errors of a row depend on each other: so many of its values count as one where fits are compared."""
CLEARLY = 3.0
"""Natural logarithm of the odds from which one fit is better than another."""
_SAME_RESIDUAL = 0.02
"""Difference of the logarithms of two residuals below which neither is the better fit, over any number of rows."""
NO_CAUSE = "no known way to get it wrong fits"
_MAX_EQUAL = 3
"""Causes that fit alike and are said."""
_TOLD_IN_FLOAT32 = 50.0
"""Roundings to float32 by which two causes differ that float32 would tell apart."""
_SAME = 1e-6
"""Relative distance up to which two causes give the same numbers, in whatever dtype they are seen."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One hypothesis and how it went."""

    hypothesis: Hypothesis
    residual: torch.Tensor
    """[R] roundings."""
    holds: torch.Tensor
    """[R] bool."""
    num_values: float
    """Independent values of the rows that it holds for."""
    is_supported: bool
    """Whether these rows are enough for what was fitted to them."""

    @classmethod
    def of(cls, hypothesis: Hypothesis, wrong: WrongOperation) -> "Trial":
        """Compare what a hypothesis gives with the wrong rows."""
        bound = wrong.bound.clamp(min=1)
        residual, holds = explained(wrong, hypothesis.output, allowance=hypothesis.allowance)
        num_rows = len(wrong.actual[holds].unique(dim=0)) if bool(holds.any()) else 0  # copies of a row count once
        num_values = num_rows * wrong.num_elements
        is_near = bool(holds.any()) and float((wrong.roundings / bound)[holds].median()) < _NEAR
        needed = hypothesis.num_fitted * (_VALUES_NEAR_THE_BOUND if is_near else _VALUES_PER_NUMBER)
        is_supported = needed <= num_values and not (is_near and num_rows < 2)
        unknown = hypothesis.unknown
        if unknown is not None and bool(holds[~unknown].any()) and bool(holds[~unknown].all()):
            holds = holds | unknown
        return cls(hypothesis, residual, holds, num_values, is_supported)

    @property
    def share(self) -> float:
        """Of the decisive rows, that it holds for; of all, where that is less than half."""
        share, decisive = float(self.holds.float().mean()), self.hypothesis.decisive
        return share if decisive is None or share < FALL else float(self.holds[decisive].float().mean())

    @property
    def is_cause(self) -> bool:
        """Whether it may be asserted."""
        return self.hypothesis.is_cause and self.fits

    @property
    def fits(self) -> bool:
        """Whether it says what was seen."""
        return self.is_supported and self.share >= MIN_SHARE

    @property
    def known(self) -> torch.Tensor:
        """[R] bool: rows that it holds for and whose numbers it says."""
        unknown = self.hypothesis.unknown
        return self.holds if unknown is None else self.holds & ~unknown

    @property
    def margin(self) -> float:
        """Rows by which two may differ and still explain as many."""
        return max(1.0, 0.02 * len(self.holds))

    def is_better_than(self, rival: "Trial") -> bool:
        """More rows explained; of about as many, by much the likelier fit, each fitted number taken into account."""
        difference = int(self.holds.sum()) - int(rival.holds.sum())
        if abs(difference) >= self.margin:
            return difference > 0
        lag = rival.lags(self)
        if abs(lag) <= CLEARLY:
            return rival.hypothesis.is_vague and not self.hypothesis.is_vague
        return lag > 0

    def is_as_good_as(self, best: "Trial") -> bool:
        """Whether the rows cannot tell the two apart."""
        if self.hypothesis.is_vague and not best.hypothesis.is_vague:
            return False
        difference = int(best.holds.sum()) - int(self.holds.sum())
        return abs(difference) < self.margin and self.lags(best) <= CLEARLY

    def names(self, fitted: "Trial") -> bool:
        """Whether it explains as many rows as one with fitted numbers does, without any.

        A number that is fitted follows how the rows were rounded: its residual is the less, and says nothing.
        """
        missed = int(fitted.holds.sum()) - int(self.holds.sum())
        is_exact = not self.hypothesis.num_fitted and not self.hypothesis.is_vague
        return is_exact and self.fits and missed < self.margin

    def lags(self, rival: "Trial") -> float:
        """Return by how much this fit is the less likely, as the logarithm of the odds.

        The residuals of rows that both hold for are taken for Gaussian, and each fitted number costs what it does in
        the Bayesian information criterion (Schwarz 1978).
        """
        both = self.known & rival.known
        if not bool(both.any()):
            return 0.0
        log_residual, log_rival = (item.residual[both].clamp(min=_FINEST).log().mean() for item in (self, rival))
        difference = float(log_residual - log_rival)
        if abs(difference) < _SAME_RESIDUAL:
            difference = 0.0
        count = max(self.num_values, rival.num_values) / DEPENDENT
        fitted = (self.hypothesis.num_fitted - rival.hypothesis.num_fitted) / 2 * math.log(max(count, math.e))
        return count * difference + fitted


def distance(first: Trial, second: Trial) -> float:
    """Return the median distance of what two hypotheses give, relative to the row."""
    first_rows, second_rows = first.hypothesis.output, second.hypothesis.output
    return float(((first_rows - second_rows).norm(dim=1) / first_rows.norm(dim=1)).nan_to_num().median())


def rank_hypotheses(
    wrong: WrongOperation, scope: str, stages: Sequence[Sequence[Explain]] | None = None
) -> Explanation:
    """Return the explanation that fits the wrong rows best; one that says so where none does.

    Args:
        wrong: the wrong rows of one operation.
        scope: which rows are wrong, in words.
        stages: what is tried; None for what is known of the operation's kind.
    """
    if stages is not None:
        failures = list[str]()
        return with_failures(_ranked(wrong, None, failures, scope, stages), failures)
    finite = wrong.actual.isfinite().all(dim=1)
    if not bool(finite.all()):
        if bool(finite.any()):
            explanation = rank_hypotheses(wrong.select(finite), scope)
            if explanation.residual_after is not None:
                return explanation
        return not_finite(wrong, scope)
    failures = list[str]()
    unrecorded, order = unrecorded_attention(wrong) or (None, None)
    if unrecorded is None:
        with guarded(unshown_attention.__name__, failures):
            unrecorded, order = unshown_attention(wrong) or (None, None)
    if order is not None:
        wrong = wrong.take(order)
    stages = stages_of(wrong.operation.kind)
    return with_failures(_ranked(wrong, unrecorded, failures, scope, stages), failures)


def with_failures(explanation: Explanation, failures: Sequence[str]) -> Explanation:
    """Return an explanation that says which others raised, and so could not be tried."""
    if not failures:
        return explanation
    notes = (explanation.detail, f"could not be tried: {', '.join(failures)}")
    return replace(explanation, detail="; ".join(note for note in notes if note))


def _ranked(
    wrong: WrongOperation,
    unrecorded: WrongOperation | None,
    failures: list[str],
    scope: str,
    stages: Sequence[Sequence[Explain]],
) -> Explanation:
    best, equal, observed = _best(wrong, unrecorded, failures, stages)
    if best is not None:
        return _explanation(best, equal, wrong, failures, scope)
    if observed is not None and observed.fits:
        return _explanation(observed, (), wrong, failures, scope)
    return _no_cause(wrong, observed, scope)


def _best(
    wrong: WrongOperation,
    unrecorded: WrongOperation | None,
    failures: list[str],
    stages: Sequence[Sequence[Explain]],
) -> tuple[Trial | None, list[Trial], Trial | None]:
    """Return the best cause, those that are as good, and the best of what fits and may not be asserted."""
    best: Trial | None = None
    observed: Trial | None = None
    fallback: Trial | None = None
    group: list[Trial] = []
    for number, stage in enumerate(stages):
        if number and best is not None and _is_perfect(best, wrong):
            break  # what can be said of any operation says less
        trials = list(_trials(stage, wrong, wrong, failures))
        if unrecorded is not None and not number:
            explanations = OF_UNRECORDED_ATTENTION if unrecorded.kept_rows is None else OF_UNSHOWN_ATTENTION
            trials = [*_trials(explanations, unrecorded, wrong, failures), *trials]
        asserted = [trial for trial in trials if trial.is_cause and not trial.hypothesis.is_fallback]
        asserted = [trial for trial in asserted if not _is_told(trial, group, wrong)]
        fallback = fallback or next((t for t in trials if t.is_cause and t.hypothesis.is_fallback), None)
        leader = best
        for trial in asserted:
            if best is None or trial.is_better_than(best):
                best = trial
        is_generic = number and number == len(stages) - 1
        group = asserted if is_generic and best is not leader else [*group, *asserted]
        for trial in (trial for trial in trials if not trial.hypothesis.is_fallback):
            if bool(trial.holds.any()) and (observed is None or _says_more(trial, observed)):
                observed = trial
    if best is None or (_is_beaten(best, observed) and not _leaves_nothing(best, wrong)):
        return fallback, [], observed
    named = _name_of(best, group, wrong)
    return named, _equals(named, group, wrong), observed


def _trials(
    explanations: Sequence[Explain], tried_on: WrongOperation, wrong: WrongOperation, failures: list[str]
) -> Iterator[Trial]:
    """Yield the trial of every hypothesis about an operation: the wrong one, or an unrecorded one before it."""
    for explain in explanations:
        with guarded(explain.__name__, failures):  # it may not know operations of this shape; others may
            for hypothesis in explain(tried_on):
                if tried_on.downstream is not None:
                    hypothesis = tried_on.downstream.pushed(hypothesis)
                if hypothesis.output.shape == wrong.actual.shape:
                    yield Trial.of(hypothesis, wrong)


def _name_of(best: Trial, group: Sequence[Trial], wrong: WrongOperation) -> Trial:
    """Return the cause without fitted numbers that gives the same rows as the best one; else the best one."""
    if not best.hypothesis.num_fitted:
        return best
    return next((trial for trial in group if trial.names(best) and _is_same(trial, best, wrong)), best)


def _equals(best: Trial, group: Sequence[Trial], wrong: WrongOperation) -> list[Trial]:
    """Return the other causes that are as good as the best one, each once."""
    causes: dict[str, Trial] = {}
    named = [trial for trial in group if not trial.hypothesis.num_fitted and trial.is_as_good_as(best)]
    for trial in group:
        if trial.hypothesis.num_fitted and any(_is_same(item, trial, wrong) for item in named):
            continue
        short_and_long = sorted((trial.hypothesis.cause, best.hypothesis.cause), key=len)
        if not short_and_long[1].startswith(short_and_long[0]) and trial.is_as_good_as(best):
            causes.setdefault(trial.hypothesis.cause, trial)
    return list(causes.values())


def _is_told(trial: Trial, earlier: Sequence[Trial], wrong: WrongOperation) -> bool:
    """Whether a cause of an earlier stage has the same rows with as few fitted numbers: that says more."""
    fitted, told = trial.hypothesis, [item for item in earlier if not item.hypothesis.is_vague]
    alike = [item for item in told if fitted.num_fitted and item.hypothesis.num_fitted <= fitted.num_fitted]
    return any(_is_same(item, trial, wrong) for item in alike)


def _is_same(one: Trial, another: Trial, wrong: WrongOperation) -> bool:
    return distance(one, another) <= max(_SAME, rounding_unit(wrong.dtype))


def _is_beaten(best: Trial, observed: Trial | None) -> bool:
    """Whether numbers that were fitted to all rows do clearly worse than other numbers in each row."""
    if observed is None or observed.hypothesis.is_cause or not observed.fits:
        return False
    return bool(best.hypothesis.num_fitted and observed.hypothesis.num_fitted) and observed.is_better_than(best)


def _says_more(trial: Trial, observed: Trial) -> bool:
    """Whether a trial is the better description of what was seen, of what may not be asserted."""
    return trial.is_better_than(observed) if trial.fits == observed.fits else trial.fits


def _is_perfect(trial: Trial, wrong: WrongOperation) -> bool:
    """Whether nothing is left that another explanation could explain better."""
    return trial.hypothesis.num_fitted <= _FITTED_WELL.get(wrong.operation.kind, 0) and _leaves_nothing(trial, wrong)


def _leaves_nothing(trial: Trial, wrong: WrongOperation) -> bool:
    """Whether every row is within its bound under a cause: what a number of each row takes off is rounding."""
    allowance = torch.where(wrong.bound > 0, wrong.bound.clamp(min=1), ALLOWANCE)
    return bool((trial.holds & (trial.residual <= allowance)).all())


def _no_cause(wrong: WrongOperation, weak: Trial | None, scope: str) -> Explanation:
    seen = pattern(wrong)
    if weak is not None:
        count = f"{int(weak.holds.sum())} of {len(weak.holds)} rows"
        seen += f"; fits {count}, too few to assert it: {weak.hypothesis.cause}"
    return Explanation(
        cause=NO_CAUSE,
        scope=scope,
        residual_before=_median(wrong.roundings),
        num_rows=len(wrong.roundings),
        is_cause=False,
        detail=seen,
    )


def _explanation(
    best: Trial, equal: Sequence[Trial], wrong: WrongOperation, failures: list[str], scope: str
) -> Explanation:
    hypothesis, provenance = best.hypothesis, None
    if hypothesis.provenance is not None:
        with guarded("the way of the cache's content", failures):
            provenance = hypothesis.provenance()
    details = [hypothesis.detail]
    if equal:
        details.append(_what_would_tell(best, equal, wrong))
    causes = [hypothesis.cause, *(item.hypothesis.cause for item in equal[: _MAX_EQUAL - 1])]
    return Explanation(
        cause=", or ".join(causes) + (f", or {len(equal) + 1 - _MAX_EQUAL} others" if len(equal) >= _MAX_EQUAL else ""),
        scope=scope,
        residual_before=_median(wrong.roundings),
        residual_after=_median(best.residual[best.known]),
        num_rows=len(wrong.roundings),
        num_explained=int(best.holds.sum()),
        num_fitted=hypothesis.num_fitted,
        is_cause=best.is_cause,
        tap=None if equal else hypothesis.tap,
        detail="; ".join(detail for detail in details if detail),
        provenance=provenance,
    )


def _what_would_tell(best: Trial, equal: Sequence[Trial], wrong: WrongOperation) -> str:
    """Say what would tell causes apart that fit alike."""
    apart = min(distance(best, item) for item in equal)
    fine = rounding_unit(torch.float32)
    if wrong.dtype in (torch.bfloat16, torch.float16) and apart > _TOLD_IN_FLOAT32 * fine:
        return "these rows cannot tell them apart: a run in float32 would"
    if apart > fine:
        return "these rows cannot tell them apart: more of them would"
    return "these rows cannot tell them apart, for which they give the same numbers: longer or other prompts would"


def _median(values: torch.Tensor) -> float:
    return float(values.median())
