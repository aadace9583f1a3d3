"""Both sides as they are given: columns of the log, values of a module or an engine, and what needs no search.

A trainer is built anew from HF's and PEFT's own classes with its tensors, because they round as a sound trainer does:
PEFT rounds the product with the weights, and then its sum with the adapter's product; autocast rounds the inputs of
each product. HF's model with merged weights does neither.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.extensions.rollout.format import Rollouts
from harness.extensions.rollout.forward import Forwards, chosen_experts
from harness.extensions.rollout.live import engine_values, trainer_values
from harness.extensions.rollout.setting import ForcedExperts, PutBack, Setting, routing_cause, weights_cause
from harness.extensions.rollout.side import Side, gain, resolution
from harness.formats.checkpoint import Checkpoint
from harness.judge.weights.sources import gathered, merged, plain_name
from harness.oracle.model import HFModel, load_model
from harness.plan import Plan


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
    module: nn.Module | None = None
    """What --model was given as, if it is no checkpoint: its adapters may be beside its weights on both sides."""
    layout: str = "right"
    autocast: torch.dtype | None = None
    """Dtype of the autocast that the trainer is run under; None for none."""
    engine: Plan | None = None
    engine_weights: Path | None = None
    previous: Path | None = None
    """Earlier weights, of which some may be in use still."""


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters, whole and with its adapters merged, by their names without wrappers."""
    whole = merged(module, where="--trainer")
    return {plain_name(name): gathered(tensor) for name, tensor in whole.named_parameters()}


def load_tensors(folder: Path, hf: HFModel, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of another checkpoint of the model, in its dtype.

    Raises:
        HarnessError: BAD_OPTION: it is a checkpoint of another model; or it cannot be read.
    """
    tensors = named_tensors(load_model(folder, dtype=hf.dtype, stays=True).model)
    odd = misfit(hf, tensors)
    if odd is None:
        return tensors
    raise HarnessError(
        Code.BAD_OPTION,
        "the checkpoint is one of another model",
        where=where,
        expected=f"the tensors of {hf.folder}, names and shapes",
        actual=f"{odd} differs",
        hint="name another version of the weights of --model",
    )


def misfit(hf: HFModel, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of a tensor that only one side has, or that has another shape; None if there is none."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected_shapes = {name: tensor.shape for name, tensor in hf.model.named_parameters()}
    return next((name for name in {**expected_shapes, **shapes} if expected_shapes.get(name) != shapes.get(name)), None)


def other_tensors(hf: HFModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those tensors that differ from the model's, in its dtype."""
    parameters = dict(hf.model.named_parameters())
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in parameters and tensor.shape == parameters[name].shape
        and not torch.equal(tensor.to(parameters[name].device, parameters[name].dtype), parameters[name])
    }  # fmt: skip


_ADAPTER_STATE = ("scaling", "merged_adapters", "_active_adapter", "_disable_adapters")
"""What a layer of PEFT's holds besides its tensors."""


def replica(module: nn.Module, hf: HFModel) -> HFModel:
    """Return HF's model with a module's own tensors, in their dtypes, and with its adapters as they are.

    What was changed in the module's code or hooked to it is not in it. Tensors are shared with the module.

    Args:
        module: of the same parameters as the model's, with PEFT's adapters or without.
        hf: the named model.
    """
    shared = {id(item): nn.Parameter(item.detach(), requires_grad=False) for item in hf.model.parameters()}
    model = copy.deepcopy(hf.model, shared)
    unwrapped: Any = module
    if getattr(unwrapped, "peft_config", None):
        unwrapped = unwrapped.get_base_model()  # which has the adapters in it
        _add_adapters(model, module, unwrapped)
    tensors = {plain_name(name): gathered(tensor) for name, tensor in unwrapped.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name].to(parameter.device)
    attention = getattr(getattr(unwrapped, "config", None), "_attn_implementation", None)
    if attention is not None:
        model.set_attn_implementation(attention)
    built = HFModel(model=model.eval(), checkpoint=hf.checkpoint, dtype=hf.dtype, device=hf.device)
    built.graph = hf.graph
    return built


def _add_adapters(model: Any, module: Any, replica_module: nn.Module) -> None:
    from peft import get_peft_model

    (first, config), *others = copy.deepcopy(module.peft_config).items()
    with warnings.catch_warnings(action="ignore"):  # of adapters that are not initialised: their values come later
        wrapped = get_peft_model(model, config, first)
        for name, config in others:
            wrapped.add_adapter(name, config)
    for path, layer in replica_module.named_modules():
        state = {name: value for name, value in vars(layer).items() if name in _ADAPTER_STATE}
        vars(model.get_submodule(plain_name(path))).update(copy.deepcopy(state))


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
    computed = chosen_experts(forwards.record(Setting()), forwards.hf)
    width, num_experts = (0, 0) if computed is None else (computed.shape[1], _num_experts(forwards.hf, computed))
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
    numbers = (getattr(hf.config, name, None) for name in names)
    return next((value for value in numbers if isinstance(value, int)), int(chosen.max()) + 1)
