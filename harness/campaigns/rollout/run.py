"""A comparison of a trainer with a rollout engine, from a log and what else is at hand."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from harness.base.progress import Progress
from harness.campaigns.rollout.causes import (
    alignment_causes,
    all_causes,
    meaning_causes,
    routing_cause,
    weights_cause,
)
from harness.campaigns.rollout.forward import Forwards, chosen_experts
from harness.campaigns.rollout.lanes import Places
from harness.campaigns.rollout.live import engine_values, trainer_values
from harness.campaigns.rollout.operations import PartTerm, part_terms
from harness.campaigns.rollout.resolution import decimal_places, resolution
from harness.campaigns.rollout.setting import Experts, Kind, Setting
from harness.campaigns.rollout.side import Side, explain, is_outside, nearest, rms
from harness.campaigns.rollout.waterfall import gap_figures, waterfall
from harness.campaigns.weights.sources import plain_name
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.rollout import Rollout, Rollouts
from harness.oracle.model import HFModel, load_model
from harness.plan import Plan
from harness.results.check import Finding
from harness.results.rollout import GapTerm, RolloutResult, SideFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is compared, and what is at hand besides the log."""

    model: str
    """As the user named it."""
    checkpoint: Checkpoint
    dtype: str
    device: str = "cpu"
    truth: str = "auto"
    head: str | None = None
    """Dtype that both sides mean to compute their head in; None for the model's."""
    trainer: nn.Module | None = None
    layout: str = "right"
    engine: Plan | None = None
    engine_weights: Path | None = None
    previous: Path | None = None
    """Earlier weights, of which some may be in use still."""


def compare_rollouts(rollouts: Rollouts, request: Request, *, progress: Progress | None = None) -> RolloutResult:
    """Split the gap between trainer and engine in terms.

    Args:
        rollouts: the log.
        request: what is compared.
        progress: told what is being done.

    Raises:
        HarnessError: TOKEN_OUTSIDE_VOCABULARY, PROMPT_TOO_LONG, ROLLOUT_MISALIGNED; or as a side at hand raises.
    """
    begin = time.perf_counter()
    if not rollouts.counts.compared:
        return _result(rollouts, request, begin)
    dtype = getattr(torch, request.dtype)
    hf = load_model(request.checkpoint, dtype=dtype, device=request.device, stays=True)
    _check_tokens(rollouts.rows, hf, rollouts.name)
    places = Places(rollouts.rows)
    head = None if request.head is None else getattr(torch, request.head)
    forwards = Forwards(hf, places, truth=request.truth, head=head if head != dtype else None)
    logged = _logged_experts(rollouts, hf, forwards)
    trainer, engine = _sides(rollouts, request, hf, forwards, logged)
    stale = None if request.previous is None else _other_tensors(hf, _loaded(request.previous, hf))
    rows = list(rollouts.rows)
    causes = [*alignment_causes(), *all_causes(hf, rows, stale, is_wide_head=head is not None and head != dtype)]
    for at, side in enumerate((trainer, engine)):
        if side is not None:
            if progress is not None:
                progress(f"explaining the {side.name}", at, 2)
            explain(side, forwards, causes, list(meaning_causes(rows)))
    parts = {
        side.name: part_terms(forwards, side.setting(), side.values)
        for side in (trainer, engine)
        if side is not None and side.values is not None
    }
    terms = waterfall(trainer, engine, forwards, parts, places, expects_replay=logged is not None)
    sides = [side for side in (trainer, engine) if side is not None]
    return _result(rollouts, request, begin, forwards=forwards, sides=sides, parts=parts, terms=terms)


def _check_tokens(rows: Sequence[Rollout], hf: HFModel, name: str) -> None:
    for row in rows:
        outside = next((token for token in row.tokens if not 0 <= token < hf.vocab_size), None)
        if outside is not None:
            what, hint = "a token is outside of the model's vocabulary", "give --model the model that was trained"
            expected = f"0 to {hf.vocab_size - 1}"
            raise HarnessError(
                Code.TOKEN_OUTSIDE_VOCABULARY,
                what,
                where=f"{name}: row {row.row}",
                expected=expected,
                actual=outside,
                hint=hint,
            )
        if hf.max_positions is not None and len(row.tokens) > hf.max_positions:
            what, expected = "the row does not fit into the model's positions", f"at most {hf.max_positions} tokens"
            where = f"{name}: row {row.row}"
            raise HarnessError(
                Code.PROMPT_TOO_LONG, what, where=where, expected=expected, actual=f"{len(row.tokens)} tokens"
            )


def _logged_experts(rollouts: Rollouts, hf: HFModel, forwards: Forwards) -> Experts | None:
    """Return the experts of the log, [tokens, layers * k]; None without any."""
    if all(row.experts is None for row in rollouts.rows):
        return None
    own = forwards.choices(Setting(), is_control=False)
    width = 0 if own is None else own.shape[1]
    ids = torch.full((forwards.places.num_tokens, width), -1, dtype=torch.int64)
    num_experts = max((int(own.max()) + 1 for own in (own,) if own is not None), default=0)
    num_experts = next(
        (
            int(value)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if isinstance(value := getattr(hf.config, name, None), int)
        ),
        num_experts,
    )
    for begin, row in zip(forwards.places.begins, rollouts.rows, strict=True):
        experts = row.experts or ()
        if experts and (len(experts[0]) != width or not all(0 <= each < num_experts for at in experts for each in at)):
            raise HarnessError(
                Code.ROLLOUT_MISALIGNED,
                "the routed experts are not those of this model",
                where=f"{rollouts.name}: row {row.row}",
                expected=f"{width} ids a token, 0 to {num_experts - 1}" if width else "no experts: a dense model",
                actual=f"{len(experts[0])} ids a token, up to {max(each for at in experts for each in at)}",
                hint="give --model the model that was trained",
            )
        if experts:
            ids[begin : begin + len(experts)] = torch.tensor(experts)
    return Experts("those of the log", ids)


def _sides(
    rollouts: Rollouts, request: Request, hf: HFModel, forwards: Forwards, logged: Experts | None
) -> tuple[Side | None, Side]:
    places, base = forwards.places, Setting(experts=logged)
    engine = Side(
        base=base,
        name="engine",
        source="recorded",
        column=places.column("engine"),
        resolution=resolution(places.column("engine")),
    )
    if request.engine is not None:
        engine.values, engine.source = engine_values(request.engine, hf, places), request.engine.case.engine
    trainer = None
    if rollouts.has_trainer:
        column = places.column("trainer")
        trainer = Side(name="trainer", source="recorded", base=base, column=column, resolution=resolution(column))
    if request.trainer is not None:
        values = trainer_values(request.trainer, hf, places, request.layout)
        column = forwards.truth(Setting(cut=values)) if trainer is None else trainer.column
        source = type(request.trainer).__name__
        trainer = Side(
            name="trainer", source=source, base=base, column=column, resolution=resolution(column), values=values
        )
    for side, folder, module in ((trainer, None, request.trainer), (engine, request.engine_weights, None)):
        if side is not None:
            _add_known(side, folder, module, hf, forwards, logged)
    return trainer, engine


def _add_known(
    side: Side,
    folder: Path | None,
    module: nn.Module | None,
    hf: HFModel,
    forwards: Forwards,
    logged: Experts | None,
) -> None:
    """Add what needs no search: the side's own weights and its own experts."""
    own = _named_tensors(module) if module is not None else None if folder is None else _loaded(folder, hf)
    tensors = {} if own is None else _other_tensors(hf, own)
    if tensors:
        side.known.append(weights_cause(tensors, f"{len(tensors)} tensors are other than the model's"))
    chosen = None if side.values is None else chosen_experts(side.values.values)
    setting = side.base
    for cause in side.known:
        setting = cause.added_to(setting)
    if chosen is not None:
        side.known.append(routing_cause(Experts(f"as the {side.name} chose", chosen)))
    elif logged is not None and side.name == "trainer":
        without = replace(setting, experts=None)
        if rms(nearest(side, forwards, without)) < rms(nearest(side, forwards, setting)):
            side.known.append(routing_cause(None))


def _loaded(folder: Path, hf: HFModel) -> dict[str, torch.Tensor]:
    """Return the tensors of another checkpoint of the model, by HF's names, in the sides' dtype."""
    return _named_tensors(load_model(folder, dtype=hf.dtype, stays=True).model)


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): tensor.detach() for name, tensor in module.named_parameters()}


def _other_tensors(hf: HFModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those tensors that differ from the model's, in its dtype."""
    own = dict(hf.model.named_parameters())
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in own and tensor.shape == own[name].shape
        and not torch.equal(tensor.to(own[name].device, own[name].dtype), own[name])
    }  # fmt: skip


def _result(
    rollouts: Rollouts,
    request: Request,
    begin: float,
    *,
    forwards: Forwards | None = None,
    sides: Sequence[Side] = (),
    parts: Mapping[str, Sequence[PartTerm]] | None = None,
    terms: Sequence[GapTerm] = (),
) -> RolloutResult:
    gap = None
    if forwards is not None:
        by_name = {side.name: side.column for side in sides}
        gap = gap_figures(by_name.get("trainer", forwards.truth(sides[-1].base)) - by_name["engine"])
    return RolloutResult(
        rollouts=rollouts.name,
        model=request.model,
        dtype=request.dtype,
        num_rows=len(rollouts.rows),
        tokens=rollouts.counts,
        gap=gap,
        terms=tuple(terms),
        sides=tuple(_side_figures(side, forwards, parts or {}) for side in sides if forwards is not None),
        findings=tuple(_finding(term, gap.mean_abs) for term in terms if not term.is_rounding and gap is not None),
        not_judged=tuple(_not_judged(rollouts, request)),
        notes=tuple(_notes(sides, terms)),
        seconds=time.perf_counter() - begin,
    )


def _side_figures(side: Side, forwards: Forwards, parts: Mapping[str, Sequence[PartTerm]]) -> SideFigures:
    setting, rest = side.setting(), side.rest(forwards)
    floor = side.floor(forwards)
    for part in parts.get(side.name, ()):
        rest = rest - part.values
    return SideFigures(
        name=side.name,
        source=side.source,
        meaning=str(setting.meaning),
        rms=rms(side.column - forwards.truth(side.base)),
        floor_rms=rms(floor),
        rest_rms=rms(rest),
        is_explained=not is_outside(rest, floor),
    )


def _finding(term: GapTerm, gap: float) -> Finding:
    if term.kind is Kind.REST:
        what = f"no known cause fits the rest: RMS {term.rms:.3g} nats, rounding gives {term.floor_rms:.3g}"
    else:
        what = f"{term.detail}; explains {term.explains:.3g} of {gap:.3g} nats; {term.remedy}"
    return Finding(
        code=Code.ROLLOUT_GAP, message=f"{term.kind}: {what}", request=term.worst_row, position=term.worst_token
    )


def _not_judged(rollouts: Rollouts, request: Request) -> list[str]:
    missing = []
    if not rollouts.has_trainer and request.trainer is None:
        missing.append("the trainer (the named model in high precision stands in its place)")
    elif request.trainer is None:
        missing.append("operations of the trainer (--trainer)")
    if request.engine is None:
        missing.append("operations of the engine (--engine)")
    if request.previous is None and request.engine_weights is None:
        missing.append("weights of the engine (--previous or --engine-weights)")
    if rollouts.counts.without_value:
        missing.append(f"{rollouts.counts.without_value} tokens without a value")
    return missing


def _notes(sides: Sequence[Side], terms: Sequence[GapTerm]) -> list[str]:
    notes = [
        f"the {side.name}'s log probabilities are written with {places} decimal places: part of the floor"
        for side in sides
        if (places := decimal_places(side.column)) is not None
    ]
    notes += [
        f"on both sides alike, so no part of the gap: {term.detail}"
        for term in terms
        if term.is_rounding and term.side == "both" and term.kind not in (Kind.REST, Kind.OPERATIONS)
    ]
    notes += [
        f"the {side.name}'s operations are those of {side.source}, run again over the same tokens"
        for side in sides
        if side.values is not None
    ]
    return notes
