"""A comparison of a trainer with a rollout engine, from a log and what else is at hand, and its result."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.base.progress import Progress
from harness.errors import Code, HarnessError, some_of
from harness.extensions.rollout.format import Rollout, Rollouts
from harness.extensions.rollout.forward import Forwards
from harness.extensions.rollout.lanes import Places
from harness.extensions.rollout.result import GapTerm, RolloutResult, SideFigures
from harness.extensions.rollout.setting import Setting, TermKind, alignment_causes, all_causes, meaning_causes
from harness.extensions.rollout.side import Side, decimal_places, explain, is_outside, possible_meanings, rms
from harness.extensions.rollout.sides import Request, load_tensors, logged_experts, make_sides, other_tensors
from harness.extensions.rollout.waterfall import PartTerm, gap_figures, part_terms, waterfall
from harness.oracle.model import HFModel, load_model
from harness.results.check import Finding

_MOST_NAMES = 8
"""Fields of the log that are named."""


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
    if explained is not None and _are_copies(explained.sides):
        yield "the gap: both columns hold the same values for all tokens, as where one is a copy of the other"
    if rollouts.counts.without_value:
        yield f"{rollouts.counts.without_value} tokens without a value"
    yield "how the tokens were drawn, only their log probabilities (harness server sampler)"
    if num_repeated := len(rollouts.rows) - len({row.tokens for row in rollouts.rows}):
        yield f"rows with the tokens of an earlier row, as one seed gives them: {num_repeated}"
    if rollouts.unread:
        yield f"the fields {some_of(rollouts.unread, _MOST_NAMES)}"


def _are_copies(sides: Sequence[Side]) -> bool:
    """Whether both sides have one column: two computations seldom agree in each bit."""
    return len(sides) > 1 and torch.equal(sides[0].column, sides[1].column)


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


def compare_rollouts(rollouts: Rollouts, request: Request, *, progress: Progress | None = None) -> RolloutResult:
    """Split the gap between trainer and engine in terms.

    Args:
        rollouts: the log.
        request: what is compared.
        progress: told what is being done.

    Raises:
        HarnessError: TOKEN_OUTSIDE_VOCABULARY, PROMPT_TOO_LONG, ROLLOUT_MISALIGNED, ORACLE_NOT_FINITE; or as a side at
            hand raises.
    """
    begin = time.perf_counter()
    explained = _explain(rollouts, request, progress) if rollouts.counts.compared else None
    return summarise(rollouts, request, explained, seconds=time.perf_counter() - begin)


def _explain(rollouts: Rollouts, request: Request, progress: Progress | None) -> Explained:
    dtype = getattr(torch, request.dtype)
    hf = load_model(request.checkpoint, dtype=dtype, device=request.device, stays=True)
    rows = list(rollouts.rows)
    _check_tokens(rows, hf, rollouts.name)
    head = None if request.head in (None, request.dtype) else getattr(torch, request.head)
    forwards = Forwards(hf, Places(rows), truth=request.truth, head=head)
    _check_finite(forwards)
    logged = logged_experts(rollouts, forwards)
    trainer, engine = make_sides(rollouts, request, forwards, logged)
    sides = [side for side in (trainer, engine) if side is not None]
    previous = None if request.previous is None else load_tensors(request.previous, hf, "--previous")
    stale = {} if previous is None else other_tensors(hf, previous)
    causes = [*alignment_causes(), *all_causes(hf, rows, stale, is_wide_head=head is not None)]
    meanings = list(meaning_causes(rows))
    for at, side in enumerate(sides):
        if progress is not None:
            progress(f"explaining the {side.name}", at, len(sides))
        # a head that is seen is an operation
        open_causes = [cause for cause in causes if side.values is None or cause.kind is not TermKind.HEAD]
        explain(side, forwards, open_causes, possible_meanings(side, forwards, meanings))
    parts = {side.name: part_terms(forwards, side, side.values) for side in sides if side.values is not None}
    terms, remedied = waterfall(trainer, engine, forwards, parts, expects_replay=logged is not None)
    return Explained(forwards=forwards, sides=sides, parts=parts, terms=terms, remedied=remedied)


def _check_tokens(rows: Sequence[Rollout], hf: HFModel, name: str) -> None:
    for row in rows:
        where = f"{name}: row {row.row}"
        outside = next((token for token in row.tokens if not 0 <= token < hf.vocab_size), None)
        if outside is not None:
            raise HarnessError(
                Code.TOKEN_OUTSIDE_VOCABULARY,
                "a token is outside of the model's vocabulary",
                where=where,
                expected=f"0 to {hf.vocab_size - 1}",
                actual=outside,
                hint="give --model the model that was trained",
            )
        if hf.max_positions is not None and len(row.tokens) > hf.max_positions:
            what, expected = "the row does not fit into the model's positions", f"at most {hf.max_positions} tokens"
            actual = f"{len(row.tokens)} tokens"
            raise HarnessError(Code.PROMPT_TOO_LONG, what, where=where, expected=expected, actual=actual)


def _check_finite(forwards: Forwards) -> None:
    """Refuse a model that computes NaN for these tokens: every comparison with it would be meaningless."""
    for name, run in (("high precision", forwards.truth), (str(forwards.hf.dtype), forwards.control)):
        odd = (~run(Setting()).isfinite()).nonzero()
        if len(odd):
            row, position = forwards.places.place(int(forwards.places.compared[int(odd[0])]))
            raise HarnessError(
                Code.ORACLE_NOT_FINITE,
                f"HF itself is not finite in {name}: no side can be judged",
                where=f"row {row.row}, token {position}",
                hint="give --dtype bfloat16; if that fails too, look for NaN in the weights",
            )
