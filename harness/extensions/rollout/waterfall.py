"""The gap as terms that add up, token by token: each side's way from the truth, the trainer's less the engine's.

A side's arithmetic is split by operation: recorded values are put back up to an operation, and the truth goes on. The
steps from one part of the model to the next add up to what the arithmetic does to the log probabilities. HF in the
side's dtype, or the trainer's replica, run on the same values up to a part, gives the floor of the step. Where a part
is outside of its floor, its operations are taken one by one, and their steps add up to the part's.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.extensions.rollout.format import Rollouts
from harness.extensions.rollout.forward import Arithmetic, Forwards
from harness.extensions.rollout.lanes import Places
from harness.extensions.rollout.result import GapFigures, GapTerm
from harness.extensions.rollout.setting import GapCause, PutBack, TermKind
from harness.extensions.rollout.side import Side, floor_of, is_outside, rms
from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTerm:
    """What the operations of one part of the model, or one of them, do to the log probabilities."""

    name: str
    """Path of the part or tap of the operation: `model.layers.3`, `lm_head`, `model.layers.3.mlp.down_proj`."""
    values: torch.Tensor
    """[compared] float64."""
    floor: torch.Tensor
    """[compared] float64: the same of HF in the side's dtype, or of the trainer's replica."""
    sound: torch.Tensor
    """[compared] float64: what HF's own operations, or the replica's, do on the same input."""
    is_head: bool

    @property
    def is_outside(self) -> bool:
        """Whether rounding alone does not give it."""
        return is_outside(self.values, self.floor)


def part_terms(forwards: Forwards, side: Side, values: PutBack) -> list[PartTerm]:
    """Return the terms of a side that computed `values`, in the order of the run.

    A part that is outside of its floor is split into its operations, if one of these is outside by itself.
    """
    hf = forwards.hf
    head = hf.part_of(hf.graph[hf.graph.logits].module)
    steps = _Steps(forwards, side, values)
    parts = _parts(hf, values)
    if len(parts) == 1:  # of a side whose logits alone are seen, they hold all that it does
        return [steps.take("the whole model, of which only logits are seen", next(iter(parts.values())))]
    terms: list[PartTerm] = []
    for part, sources in parts.items():
        begin = steps.begin
        term = steps.take(part, sources, is_head=part == head)
        terms_of_part = [term]
        if len(sources) > 1 and term.is_outside:
            end, steps.begin = steps.begin, begin
            terms_of_part = [steps.take(_name(hf, source), [source], is_head=part == head) for source in sources]
            steps.begin = end
        terms += terms_of_part if any(item.is_outside for item in terms_of_part) else [term]
    return terms


class _Steps:
    """The truth with the side's values put back up to `begin`, from where the next values are put back."""

    def __init__(self, forwards: Forwards, side: Side, values: PutBack) -> None:
        self._forwards, self._values = forwards, values.values
        self._is_trainer = side.name == "trainer"
        self._least = float(forwards.noise(side.setting()).min())
        self.begin = side.setting()

    def take(self, name: str, sources: Sequence[str], *, is_head: bool = False) -> PartTerm:
        """Put the values of sources back, too, and return what that does."""
        forwards, begin = self._forwards, self.begin
        recorded = begin.cut.values if begin.cut is not None else {}
        control = forwards.record(begin, is_trainer=self._is_trainer)
        same = {source: control[source] for source in sources if source in control}
        rounded = replace(begin, cut=PutBack({**recorded, **same}))
        floor = forwards.deviation((rounded, Arithmetic.TRUTH), (begin, Arithmetic.TRUTH), begin)
        self.begin = replace(begin, cut=PutBack({**recorded, **{source: self._values[source] for source in sources}}))
        before = forwards.truth(begin)
        sound = forwards.truth(rounded) - before
        return PartTerm(
            name=name,
            values=forwards.truth(self.begin) - before,
            sound=sound,
            # what HF itself does there is legitimate: with wrong values before it, an operation may round in long tails
            floor=torch.maximum(floor, sound.abs()).clamp(min=self._least),
            is_head=is_head,
        )


def _name(hf: HFModel, source: str) -> str:
    operation = hf.graph.by_source.get(source)
    return operation.tap if operation is not None else source


def _parts(hf: HFModel, values: PutBack) -> dict[str, list[str]]:
    """Return the parts that have recorded values, in the order of the run, and the sources of these."""
    parts: dict[str, list[str]] = {}
    for operation in hf.graph:
        if operation.source in values.values:
            parts.setdefault(hf.part_of(operation.module), []).append(operation.source)
    return parts


_LEAST_DEVIATIONS = 3.0
"""A cause that was found is no rounding if its size is known to so many standard deviations."""
_LEAST = 1e-12


@dataclass(slots=True, kw_only=True)
class _Term:
    """A term before it is judged; tensors [compared] float64."""

    kind: TermKind
    sides: list[str]
    details: list[str]
    values: torch.Tensor
    floor: torch.Tensor
    remedies: list[str] = field(default_factory=list)
    is_found: bool = False
    """Whether it is a cause that was found or seen, and no sum of roundings."""
    mended: torch.Tensor | None = None
    """What goes of the gap with the remedy, [compared]; None without a remedy."""

    @property
    def _units(self) -> float:
        """Norm of its values, each in units of the token's floor."""
        return float((self.values / self.floor).square().sum().sqrt())

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone may give it."""
        return self._units <= _LEAST_DEVIATIONS if self.is_found else not is_outside(self.values, self.floor)

    @property
    def floor_rms(self) -> float:
        """RMS of its floor; of a cause, what a fit of it to rounding gives: it is one direction among many tokens'."""
        return rms(self.values) / max(self._units, _LEAST) if self.is_found else rms(self.floor)


def gap_figures(gap: torch.Tensor) -> GapFigures:
    """Return the figures of a gap, [compared] float64: the trainer's log probabilities less the engine's."""
    log_weights = gap - gap.max()
    weights = log_weights.exp()
    ratio = gap.clamp(max=700).exp()
    return GapFigures(
        mean=float(gap.mean()),
        mean_abs=float(gap.abs().mean()),
        rms=rms(gap),
        max_abs=float(gap.abs().max()),
        k1=-float(gap.mean()),
        k3=float((ratio - 1 - gap).mean()),
        max_ratio=math.exp(min(700.0, float(gap.max()))),
        effective_samples=float(weights.sum() ** 2 / weights.square().sum()) / len(gap),
    )


def recorded_gap(rollouts: Rollouts) -> torch.Tensor | None:
    """Return the gap of a log that has both columns, [compared] float64; None if no token has both values."""
    if not (rollouts.has_trainer and rollouts.counts.compared):
        return None
    places = Places(rollouts.rows)
    return places.column("trainer") - places.column("engine")


def waterfall(
    trainer: Side | None,
    engine: Side,
    forwards: Forwards,
    parts: Mapping[str, Sequence[PartTerm]],
    *,
    expects_replay: bool,
) -> tuple[list[GapTerm], float | None]:
    """Return the terms of the gap, and its mean absolute value with all remedies applied; None if there are none.

    Args:
        trainer: explained; None where the truth stands for it.
        engine: explained.
        forwards: of the truth and the control.
        parts: by side, what its operations give, for sides that are at hand.
        expects_replay: whether the trainer is to use the engine's experts; else each side may choose within rounding.
    """
    terms: list[_Term] = []
    sides = [(side, sign) for side, sign in ((trainer, 1.0), (engine, -1.0)) if side is not None]
    for side, sign in sides:
        _add_causes(terms, side, sign, forwards)
    rests = [_rest_terms(side, sign, forwards, parts.get(side.name, ())) for side, sign in sides]
    rest_terms = [term for several, _ in rests for term in several]
    rest = _sum([last for _, last in rests])
    gap = sum((term.values for term in (*terms, *rest_terms, rest)), torch.zeros_like(engine.column))
    floor = torch.stack([floor_of(side, forwards, side.base) for side, _ in sides]).norm(dim=0)
    for term in terms:
        term.floor = floor
        if term.kind is TermKind.ROUTING and not expects_replay:
            term.floor, term.is_found = forwards.sound_noise(engine.base) * math.sqrt(len(rests)), False
    ordered = sorted(terms, key=lambda term: list(TermKind).index(term.kind))
    outside = {term.kind for term in terms if not term.is_rounding}
    for term in terms:
        if term.kind in outside:
            term.mended = _mended({term.kind}, trainer, engine, forwards)
    left = gap - _mended(outside, trainer, engine, forwards)
    for term in rest_terms:
        left = left if term.is_rounding or term.mended is None else left - term.mended
    has_remedy = any(not term.is_rounding for term in (*terms, *rest_terms))
    judged = [_judged(term, gap, forwards.places) for term in (*ordered, *rest_terms, rest)]
    return judged, float(left.abs().mean()) if has_remedy else None


def _mended(kinds: Collection[TermKind], trainer: Side | None, engine: Side, forwards: Forwards) -> torch.Tensor:
    """Return what goes of the gap if the remedies of these kinds are applied and all else is as it was, [compared]."""
    gone = torch.zeros_like(engine.column)
    for side, sign in ((trainer, 1.0), (engine, -1.0)):
        if side is not None:
            left = _causes_left(side, kinds, trainer, engine)
            gone = gone + sign * (side.predicted(forwards, side.causes) - side.predicted(forwards, left))
    return gone


def _causes_left(side: Side, kinds: Collection[TermKind], trainer: Side | None, engine: Side) -> list[GapCause]:
    """Return a side's causes after remedies. Of two sides that route by themselves, the trainer takes the engine's."""
    if TermKind.ROUTING in kinds and trainer is not None:
        if side is engine:
            kinds = set(kinds) - {TermKind.ROUTING}
        else:
            replayed = [cause for cause in engine.causes if cause.kind is TermKind.ROUTING]
            return [*(cause for cause in side.causes if cause.kind not in kinds), *replayed]
    return [cause for cause in side.causes if cause.kind not in kinds]


def _add_causes(terms: list[_Term], side: Side, sign: float, forwards: Forwards) -> None:
    """Add the step from one of a side's causes to the next to the terms; both sides share the terms of a kind."""
    for cause, step in zip(side.causes, side.steps(forwards), strict=True):
        same = next((term for term in terms if term.kind is cause.kind), None)
        if same is None:
            none = torch.zeros_like(step)
            same = _Term(kind=cause.kind, sides=[], details=[], values=none, floor=none, is_found=True)
            terms.append(same)
        same.values = same.values + sign * step
        same.sides += [side.name] if side.name not in same.sides else []
        same.details.append(f"{side.name}: {cause.detail}")
        same.remedies.append(cause.remedy)


def _rest_terms(side: Side, sign: float, forwards: Forwards, parts: Sequence[PartTerm]) -> tuple[list[_Term], _Term]:
    """Return the terms of a side's operations, those inside of their floor as one, and what is left."""
    rest = side.rest(forwards)
    terms: list[_Term] = []
    sound: list[_Term] = []
    for part in parts:
        rest = rest - part.values
        compute = f"compute {part.name} as HF does: harness check says what is wrong in it"
        term = _Term(
            kind=TermKind.HEAD if part.is_head else TermKind.OPERATIONS,
            sides=[side.name],
            details=[f"{side.name}: {part.name}"],
            values=sign * part.values,
            floor=part.floor,
            remedies=["compute the head in float32" if part.is_head else compute],
            mended=sign * (part.values if part.is_head else part.values - part.sound),
        )
        (sound if term.is_rounding else terms).append(term)
    if sound:
        together = _sum(sound)
        together.kind, together.sides = TermKind.OPERATIONS, [side.name]
        together.details = [f"{side.name}: {'all' if not terms else 'all other'} operations"]
        terms.append(together)
    floor = side.floor(forwards)  # with parts, too: two runs of one side differ by rounding
    what = "what is recorded, less what it computes now" if parts else "its operations, not seen one by one"
    details = [] if parts and not bool(rest.any()) else [f"{side.name}: {what}"]
    return terms, _Term(kind=TermKind.REST, sides=[side.name], details=details, values=sign * rest, floor=floor)


def _sum(terms: Sequence[_Term]) -> _Term:
    return _Term(
        kind=terms[0].kind,
        sides=list(dict.fromkeys(side for term in terms for side in term.sides)),
        details=[detail for term in terms for detail in term.details],
        values=torch.stack([term.values for term in terms]).sum(dim=0),
        floor=torch.stack([term.floor for term in terms]).norm(dim=0),
    )


def _judged(term: _Term, gap: torch.Tensor, places: Places) -> GapTerm:
    values, is_rounding = term.values, term.is_rounding
    mends = values if term.mended is None or is_rounding else term.mended
    row, position = places.place(int(places.compared[int(values.abs().argmax())]))
    remedies = list(dict.fromkeys(term.remedies))
    return GapTerm(
        kind=term.kind,
        side=term.sides[0] if len(term.sides) == 1 else "both",
        detail="; ".join(term.details),
        mean=float(values.mean()),
        mean_abs=float(values.abs().mean()),
        rms=rms(values),
        floor_rms=term.floor_rms,
        is_rounding=is_rounding,
        explains=float(gap.abs().mean() - (gap - mends).abs().mean()),
        remedy="" if is_rounding else "; ".join(remedies),
        worst_row=row.row,
        worst_token=position,
    )
