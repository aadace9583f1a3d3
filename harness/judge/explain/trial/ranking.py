"""The trial: every explanation of an operation's kind against the wrong rows, and the one that fits best.

An explanation holds for a row if the row's error against what it would give falls to the rounding floor: to twice the
row's own bound at most (under the cause other roundings may be made, and one even where none is allowed), and to half
of the error at most. It is asserted if the rows that it holds for are enough for the numbers that were fitted to them,
and if no other cause fits as well: causes that the rows cannot tell apart are all said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module

import torch

from harness.base import plugins
from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, Kind
from harness.judge.compare.evidence import guarded
from harness.judge.explain.attention.unrecorded import PARAMETERS, unrecorded_attention
from harness.judge.explain.core.failure import Explain, Failure
from harness.judge.explain.trial.not_finite import not_finite
from harness.judge.explain.trial.pattern import pattern
from harness.judge.explain.trial.trial import Trial, WrongRows, distance
from harness.results.check import Explanation

NO_CAUSE = "no known way to get it wrong fits"
_WELL_EXPLAINED = 0.85
_MAX_EQUAL = 3
"""Causes that fit alike and are said."""
_TOLD_IN_FLOAT32 = 50.0
"""Roundings to float32 by which two causes differ that float32 would tell apart."""
_BROUGHT = "extension:"
"""Before the name of an extension's module of explanations."""
_GENERIC = "any_kind.generic"
_LAST = ("layer.wiring", "any_kind.settings", _GENERIC)
"""What is tried only where nothing else explains every row."""
_SAME = 1e-6
"""Relative distance up to which two causes give the same numbers, in whatever dtype they are seen."""
_EXACT_ALLOWANCE = 2.0
"""Roundings that the right cause may leave if none is allowed: a factor may be rounded, too."""


def rank_hypotheses(failure: Failure, roundings: torch.Tensor, bound: torch.Tensor, scope: str) -> Explanation:
    """Return the explanation that fits the failure best; one that says so where none does.

    Args:
        failure: the wrong rows.
        roundings: [R] their errors against what they should be.
        bound: [R] the errors that rounding explains.
        scope: which rows are wrong, in words.
    """
    finite = failure.actual.isfinite().all(dim=1)
    if not bool(finite.all()):
        if bool(finite.any()):
            explanation = rank_hypotheses(failure.select(finite), roundings[finite], bound[finite], scope)
            if explanation.residual_after is not None:
                return explanation
        return not_finite(failure, roundings, scope)
    evidence = _evidence(failure, roundings, bound)
    return with_failures(_ranked(evidence, scope), evidence.failures)


def _evidence(failure: Failure, roundings: torch.Tensor, bound: torch.Tensor) -> WrongRows:
    """Return the evidence; where the attention before the operation was not recorded, with that."""
    attention = unrecorded_attention(failure) if failure.unrecorded and not failure.views else None
    if attention is None:
        return WrongRows(failure, roundings, bound)
    inner, order = attention
    return WrongRows(failure.take(order), roundings[order], bound[order], attention=inner)


def with_failures(explanation: Explanation, failures: Sequence[str]) -> Explanation:
    """Return an explanation that says which others raised, and so could not be tried."""
    if not failures:
        return explanation
    notes = (explanation.detail, f"could not be tried: {', '.join(failures)}")
    return replace(explanation, detail="; ".join(note for note in notes if note))


def _ranked(evidence: WrongRows, scope: str) -> Explanation:
    best, equal, other = _best(evidence)
    if best is None and other is not None and other.fits:
        return _explanation(other, (), evidence, scope)
    if best is None:
        return _no_cause(evidence, other, scope)
    return _explanation(best, equal, evidence, scope)


def causes_of(kind: Kind) -> Sequence[Explain]:
    """Return what is tried for a kind of operation, the likelier first."""
    return [explain for name in _modules(kind) for explain in _explanations(name, kind)]


def _modules(kind: Kind) -> list[str]:
    """Return the modules of explanations of a kind: what extensions bring comes before what says less."""
    causes = KINDS[kind].causes
    brought = [f"{_BROUGHT}{name}" for name in plugins.entries(plugins.EXPLANATIONS)]
    return [*(name for name in causes if name not in _LAST), *brought, *(name for name in causes if name in _LAST)]


def _explanations(name: str, kind: Kind) -> Sequence[Explain]:
    explanations: Sequence[Explain]
    if name.startswith(_BROUGHT):
        explanations = plugins.load(plugins.EXPLANATIONS, name.removeprefix(_BROUGHT)).EXPLANATIONS.get(kind, ())
    else:
        explanations = import_module(f"harness.judge.explain.{name}").EXPLANATIONS
    return explanations


def _best(evidence: WrongRows) -> tuple[Trial | None, list[Trial], Trial | None]:
    """Return the best cause, those that are as good, and the best of what fits and may not be asserted."""
    best: Trial | None = None
    other: Trial | None = None
    fallback: Trial | None = None
    group: list[Trial] = []
    for name in _names(evidence):
        if best is not None and name in _LAST and _is_perfect(best, evidence):
            break  # what can be said of any operation says less
        trials = list(_trials(name, evidence))
        asserted = [trial for trial in trials if trial.is_cause and not trial.hypothesis.is_fallback]
        fallback = fallback or next((t for t in trials if t.is_cause and t.hypothesis.is_fallback), None)
        leader = best
        for trial in asserted:
            if best is None or trial.is_better_than(best):
                best = trial
        group = asserted if name == _GENERIC and best is not leader else [*group, *asserted]
        for trial in (trial for trial in trials if not trial.hypothesis.is_fallback):
            if bool(trial.holds.any()) and (other is None or _says_more(trial, other)):
                other = trial
    if best is None or _is_beaten(best, other):
        return fallback, [], other
    causes: dict[str, Trial] = {}

    def is_same(one: Trial, other: Trial) -> bool:
        return distance(one, other) <= max(_SAME, rounding_unit(evidence.failure.dtype))

    if best.hypothesis.freedom:  # what fits without a number that was fitted, and gives the same, is its name
        best = next((trial for trial in group if trial.names(best) and is_same(trial, best)), best)
    named = [trial for trial in group if not trial.hypothesis.freedom and trial.is_as_good_as(best)]
    for trial in group:
        if trial.hypothesis.freedom and any(is_same(item, trial) for item in named):
            continue
        if trial.hypothesis.cause != best.hypothesis.cause and trial.is_as_good_as(best):
            causes.setdefault(trial.hypothesis.cause, trial)
    return best, list(causes.values()), other


def _names(evidence: WrongRows) -> Iterator[str]:
    """Yield what is tried: causes in what was not recorded before those of the operation itself."""
    yield from () if evidence.attention is None else PARAMETERS
    yield from _modules(evidence.failure.operation.kind)


def _is_beaten(best: Trial, other: Trial | None) -> bool:
    """Whether numbers that were fitted to all rows do clearly worse than other numbers in each row."""
    if other is None or other.hypothesis.is_cause or not other.fits:
        return False
    return bool(best.hypothesis.freedom and other.hypothesis.freedom) and other.is_better_than(best)


def _says_more(trial: Trial, other: Trial) -> bool:
    """Whether what may not be asserted is the better description of what was seen."""
    return trial.is_better_than(other) if trial.fits == other.fits else trial.fits


def _trials(name: str, evidence: WrongRows) -> Iterator[Trial]:
    inner = evidence.attention if name in PARAMETERS else None
    for explain in _explanations(name, evidence.failure.operation.kind):
        with guarded(explain.__name__, evidence.failures):  # it may not know operations of this shape; others may
            for hypothesis in explain(inner or evidence.failure):
                if inner is not None and inner.beyond is not None:
                    hypothesis = inner.beyond.pushed(hypothesis)
                if hypothesis.output.shape == evidence.failure.actual.shape:
                    yield Trial.of(hypothesis, evidence)


def _is_perfect(trial: Trial, evidence: WrongRows) -> bool:
    """Whether nothing is left that another explanation could explain better."""
    allowance = torch.where(evidence.bound > 0, evidence.bound.clamp(min=1), _EXACT_ALLOWANCE)
    is_left = ~trial.holds | (trial.residual > allowance)
    return trial.hypothesis.freedom == 0 and not bool(is_left.any())


def _no_cause(evidence: WrongRows, weak: Trial | None, scope: str) -> Explanation:
    seen = pattern(evidence.failure)
    if weak is not None:
        count = f"{int(weak.holds.sum())} of {len(weak.holds)}"
        seen += f"; {count} rows would fit, and are too few to say it: {weak.hypothesis.cause}"
    return Explanation(
        cause=NO_CAUSE,
        scope=scope,
        residual_before=_median(evidence.roundings),
        num_rows=len(evidence.roundings),
        is_cause=False,
        detail=seen,
    )


def _explanation(best: Trial, equal: Sequence[Trial], evidence: WrongRows, scope: str) -> Explanation:
    hypothesis, provenance = best.hypothesis, None
    if hypothesis.provenance is not None:
        with guarded("the way of the cache's content", evidence.failures):
            provenance = hypothesis.provenance()
    details = [hypothesis.detail]
    if best.share < _WELL_EXPLAINED:
        details.append("some rows have another cause")
    if equal:
        details.append(_what_would_tell(best, equal, evidence))
    causes = [hypothesis.cause, *(item.hypothesis.cause for item in equal[: _MAX_EQUAL - 1])]
    return Explanation(
        cause=", or ".join(causes) + (f", or {len(equal) + 1 - _MAX_EQUAL} others" if len(equal) >= _MAX_EQUAL else ""),
        scope=scope,
        residual_before=_median(evidence.roundings),
        residual_after=_median(best.residual[best.known]),
        num_rows=len(evidence.roundings),
        num_explained=int(best.holds.sum()),
        num_fitted=hypothesis.freedom,
        is_cause=best.is_cause,
        detail="; ".join(detail for detail in details if detail),
        provenance=provenance,
    )


def _what_would_tell(best: Trial, equal: Sequence[Trial], evidence: WrongRows) -> str:
    """Say what would tell causes apart that fit alike."""
    apart = min(distance(best, item) for item in equal)
    fine = rounding_unit(torch.float32)
    if evidence.failure.dtype in (torch.bfloat16, torch.float16) and apart > _TOLD_IN_FLOAT32 * fine:
        return "these rows cannot tell them apart: a run in float32 would"
    if apart > fine:
        return "these rows cannot tell them apart: more of them would"
    return "these rows cannot tell them apart, for which they give the same numbers: longer or other prompts would"


def _median(values: torch.Tensor) -> float:
    return float(values.median())
