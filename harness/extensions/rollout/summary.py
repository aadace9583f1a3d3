"""What was found as a result: figures of the gap and of both sides, findings, and what was not judged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.errors import Code
from harness.extensions.rollout.format import Rollouts
from harness.extensions.rollout.forward import Forwards
from harness.extensions.rollout.operations import PartTerm
from harness.extensions.rollout.request import Request
from harness.extensions.rollout.result import GapTerm, RolloutResult, SideFigures
from harness.extensions.rollout.setting import TermKind
from harness.extensions.rollout.side import Side, decimal_places, is_outside, rms
from harness.extensions.rollout.waterfall import gap_figures
from harness.results.check import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The gap, explained."""

    forwards: Forwards
    sides: Sequence[Side]
    """The trainer, if anything is known of it, and the engine."""
    parts: Mapping[str, Sequence[PartTerm]]
    """What the operations of a side at hand do, by the side's name."""
    terms: Sequence[GapTerm]
    remedied: float | None
    """Mean absolute gap with all remedies applied; None without any."""


def summarise(rollouts: Rollouts, request: Request, explained: Explained | None, *, seconds: float) -> RolloutResult:
    """Return the result; `explained` is None where no token was compared."""
    gap = None
    if explained is not None:
        *others, engine = explained.sides
        trainer = others[0].column if others else explained.forwards.truth(engine.base)
        gap = gap_figures(trainer - engine.column)
    terms = explained.terms if explained is not None else ()
    sides = tuple(_side_figures(side, explained) for side in explained.sides) if explained is not None else ()
    return RolloutResult(
        rollouts=rollouts.name,
        model=request.model,
        dtype=request.dtype,
        num_rows=len(rollouts.rows),
        tokens=rollouts.counts,
        gap=gap,
        terms=tuple(terms),
        remedied=explained.remedied if explained is not None else None,
        sides=sides,
        findings=tuple(_finding(term, gap.mean_abs) for term in terms if not term.is_rounding and gap is not None),
        not_judged=tuple(_not_judged(rollouts, request, explained)),
        notes=tuple(_notes(explained, sides)) if explained is not None else (),
        seconds=seconds,
    )


def _side_figures(side: Side, explained: Explained) -> SideFigures:
    forwards = explained.forwards
    rest, floor = side.rest(forwards), side.floor(forwards)
    for part in explained.parts.get(side.name, ()):
        rest = rest - part.values
    return SideFigures(
        name=side.name,
        source=side.source,
        meaning=str(side.setting().meaning),
        rms=rms(side.column - forwards.truth(side.base)),
        floor_rms=rms(floor),
        rest_rms=rms(rest),
        is_explained=not is_outside(rest, floor),
    )


def _finding(term: GapTerm, gap: float) -> Finding:
    if term.kind is TermKind.REST:
        what = f"no known cause fits the rest: RMS {term.rms:.3g} nats, rounding gives {term.floor_rms:.3g}"
    else:
        what = f"{term.detail}; explains {term.explains:.3g} of {gap:.3g} nats; {term.remedy}"
    return Finding(
        code=Code.ROLLOUT_GAP, message=f"{term.kind}: {what}", request=term.worst_row, position=term.worst_token
    )


def _not_judged(rollouts: Rollouts, request: Request, explained: Explained | None) -> Iterator[str]:
    if not rollouts.has_trainer and request.trainer is None:
        yield "the trainer (the named model in high precision stands in its place)"
    elif request.trainer is None:
        yield "operations of the trainer (--trainer)"
    elif explained is not None and (odd := explained.sides[0].unlike) is not None:
        yield f"operations and weights of the trainer: its tensors are not those of the model ({odd} differs)"
    if request.engine is None:
        yield "operations of the engine (--engine)"
    if request.previous is None and request.engine_weights is None:
        yield "weights of the engine (--previous or --engine-weights)"
    if rollouts.counts.without_value:
        yield f"{rollouts.counts.without_value} tokens without a value"


def _notes(explained: Explained, sides: Sequence[SideFigures]) -> Iterator[str]:
    if (
        len(sides) > 1
        and not any(side.is_explained for side in sides)
        and all(term.is_rounding for term in explained.terms)
    ):
        yield "both sides are outside of their floors, and alike: look whether --model is what they run"
    for side in explained.sides:
        places = decimal_places(side.column)
        if places is not None:
            yield f"the {side.name}'s log probabilities are written with {places} decimal places: part of the floor"
    for term in explained.terms:
        if term.is_rounding and term.side == "both" and term.kind not in (TermKind.REST, TermKind.OPERATIONS):
            yield f"on both sides alike, so no part of the gap: {term.detail}"
    for side in explained.sides:
        if side.values is not None:
            yield f"the {side.name}'s operations are those of {side.source}, run again over the same tokens"
