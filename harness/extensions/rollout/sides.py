"""Both sides as they are given: columns of the log, values of a module or an engine, and what needs no search."""

import torch

from harness.errors import Code, HarnessError
from harness.extensions.rollout.causes import routing_cause, weights_cause
from harness.extensions.rollout.format import Rollouts
from harness.extensions.rollout.forward import Forwards, chosen_experts
from harness.extensions.rollout.live import engine_values, trainer_values
from harness.extensions.rollout.replica import replica
from harness.extensions.rollout.request import Request
from harness.extensions.rollout.setting import ForcedExperts, PutBack, Setting
from harness.extensions.rollout.side import Side, gain, resolution
from harness.extensions.rollout.tensors import load_tensors, misfit, named_tensors, other_tensors
from harness.oracle.model import HFModel


def make_sides(
    rollouts: Rollouts, request: Request, forwards: Forwards, logged: ForcedExperts | None
) -> tuple[Side | None, Side]:
    """Return the trainer, None if nothing is known of it, and the engine.

    Args:
        rollouts: the log.
        request: what is at hand besides the log.
        forwards: of the named model.
        logged: experts of the log.

    Raises:
        HarnessError: as a side at hand raises.
    """
    hf, places = forwards.hf, forwards.places
    trainer = engine_cut = trainer_cut = odd = None
    if request.engine is not None:
        engine_cut = engine_values(request.engine, hf, places)
    source = "recorded" if request.engine is None else request.engine.case.engine
    engine = _side("engine", source, places.column("engine"), engine_cut, logged)
    tensors: dict[str, torch.Tensor] = {}
    if request.trainer is not None:
        tensors = named_tensors(request.trainer)
        odd = misfit(hf, tensors)
        with torch.autocast(hf.device.type, request.autocast, enabled=request.autocast is not None):
            trainer_cut = trainer_values(request.trainer, hf, places, request.layout, is_like=odd is None)
    if trainer_cut is not None or rollouts.has_trainer:
        column = places.column("trainer") if rollouts.has_trainer else forwards.truth(Setting(cut=trainer_cut))
        source = "recorded" if request.trainer is None else type(request.trainer).__name__
        trainer = _side("trainer", source, column, trainer_cut, logged)
        trainer.unlike = odd
    if request.engine_weights is not None:
        _add_weights(hf, engine, other_tensors(hf, load_tensors(request.engine_weights, hf, "--engine-weights")))
    if trainer is not None and odd is None:
        _add_weights(hf, trainer, other_tensors(hf, tensors))
    for side in (trainer, engine):
        if side is not None:
            _add_routing(side, forwards, logged)
    forwards.add_eager(engine.base)
    module = request.module if request.trainer is None else request.trainer
    if module is not None and odd is None:
        setting = engine.base if trainer is None or request.trainer is None else trainer.setting(trainer.known)
        forwards.add_replica(replica(module, hf), setting, autocast=request.autocast)
    return trainer, engine


def _side(name: str, source: str, column: torch.Tensor, values: PutBack | None, logged: ForcedExperts | None) -> Side:
    base = Setting(experts=logged)
    return Side(base=base, name=name, source=source, column=column, resolution=resolution(column), values=values)


def _add_weights(hf: HFModel, side: Side, tensors: dict[str, torch.Tensor]) -> None:
    if tensors:
        side.known.append(weights_cause(hf, tensors, f"{len(tensors)} tensors are other than the model's"))


def _add_routing(side: Side, forwards: Forwards, logged: ForcedExperts | None) -> None:
    """Add the experts that a side at hand chose; of a recorded trainer, that it chose others than those of the log."""
    chosen = None if side.values is None else chosen_experts(side.values.values, forwards.hf)
    if chosen is not None:
        side.known.append(routing_cause(ForcedExperts(f"as the {side.name} chose", chosen)))
    elif logged is not None and side.name == "trainer":
        unknown = routing_cause(None)
        if float(gain(side, forwards, side.known, [*side.known, unknown]).sum()) > 0:
            side.known.append(unknown)


def logged_experts(rollouts: Rollouts, forwards: Forwards) -> ForcedExperts | None:
    """Return the experts of the log, [tokens, layers * k]; None without any.

    Raises:
        HarnessError: ROLLOUT_MISALIGNED: they are those of another model.
    """
    if all(row.experts is None for row in rollouts.rows):
        return None
    own = chosen_experts(forwards.record(Setting()), forwards.hf)
    width, num_experts = (0, 0) if own is None else (own.shape[1], _num_experts(forwards.hf, own))
    ids = torch.full((forwards.places.num_tokens, width), -1, dtype=torch.int64)
    for begin, row in zip(forwards.places.begins, rollouts.rows, strict=True):
        experts = row.experts or ()
        named = [item for at in experts for item in at]
        if len(named) != width * len(experts) or not all(0 <= item < num_experts for item in named):
            raise HarnessError(
                Code.ROLLOUT_MISALIGNED,
                "the routed experts are not those of this model",
                where=f"{rollouts.name}: row {row.row}",
                expected=f"{width} ids a token, 0 to {num_experts - 1}" if width else "no experts: a dense model",
                actual=f"{len(experts[0])} ids a token, {min(named, default='none')} to {max(named, default='none')}",
                hint="give --model the model that was trained",
            )
        if named:
            ids[begin : begin + len(experts)] = torch.tensor(experts)
    return ForcedExperts("those of the log", ids)


def _num_experts(hf: HFModel, chosen: torch.Tensor) -> int:
    """Return how many experts a layer has; without a known name in the config, as many as were chosen at least."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = (getattr(hf.config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), int(chosen.max()) + 1)
