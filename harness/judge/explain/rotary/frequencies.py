"""The frequencies of the rotary embedding are wrong: another base or scaling than in config.json, or another layer's.

`R` rows, `P` pairs of a head.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from harness.judge.explain.core.fit import fit_by_search
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.rotary.rotation import Causes, turned_by, with_rotation
from harness.oracle.rotation import Rotation

_THETAS = (1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
"""Bases that published models use."""
_GRID_OF_THETAS = [1e2 * math.exp(step / 25) for step in range(400)]
"""Bases from 100 to 900 million among which the best one is looked for."""
_FACTORS = (0.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
_GRID_OF_FACTORS = [math.exp(step / 50) / 64 for step in range(416)]
"""Factors from 1/64 to 64 among which the best one is looked for."""
_USUAL_VALUES: dict[str, tuple[float, ...]] = {
    "factor": (1.0, *_FACTORS),
    "low_freq_factor": (1.0, 2.0, 4.0, 8.0),
    "high_freq_factor": (1.0, 2.0, 4.0, 8.0, 16.0),
    "original_max_position_embeddings": (2048, 4096, 8192, 16384, 32768, 65536, 131072),
    "attention_factor": (1.0,),
    "beta_fast": (16.0, 32.0, 64.0),
    "beta_slow": (1.0, 2.0, 4.0),
}
"""Of parameters of scalings, in published models."""
_PAIRS = (("low_freq_factor", "high_freq_factor"), ("beta_fast", "beta_slow"))
_MADE: WeakKeyDictionary[torch.nn.Module, dict[str, Rotation | None]] = WeakKeyDictionary()
"""Rotations by the model's own rotary module, and by the parameters that they were made of."""


@with_rotation
def scaling_ignored(wrong: WrongOperation, right: Rotation) -> Causes:
    """The frequencies are those of a model without rope scaling; a factor of cos and sin is kept, or is not.

    Causes: rope scaling (*type*) is ignored; is ignored but for its factor of cos and sin.
    """
    parameters = rope_parameters(wrong, right)
    if parameters.get("rope_type", "default") == "default" or "rope_theta" not in parameters:
        return
    plain = with_parameters(wrong, right, {"rope_type": "default", "rope_theta": parameters["rope_theta"]})
    if plain is not None:
        yield Hypothesis(
            cause=f"rope scaling ({parameters['rope_type']}) is ignored",
            output=plain.turn(wrong.inputs[0], wrong.positions),
        )
    if plain is not None and plain.scaling != right.scaling:
        yield Hypothesis(
            cause=f"rope scaling ({parameters['rope_type']}) is ignored but for its factor of cos and sin",
            output=replace(plain, scaling=right.scaling).turn(wrong.inputs[0], wrong.positions),
        )


@with_rotation
def other_scaling(wrong: WrongOperation, right: Rotation) -> Causes:
    """The frequencies are scaled in another way than config.json says, or by another factor.

    Causes: rope scaling: *parameter* is *value* instead of *value*; two of them are exchanged; the short factors
    (LongRoPE) are used where the long ones belong, or the reverse; rope scaling: linear or yarn with factor *value*,
    which config.json does not ask for; the ends of yarn's ramp are rounded to whole dimensions, or are not.
    """
    parameters = rope_parameters(wrong, right)
    if "rope_theta" not in parameters:
        return
    meant = str(parameters.get("rope_type", "default"))
    plain = with_parameters(wrong, right, {"rope_type": "default", "rope_theta": parameters["rope_theta"]})
    kept = None if plain is None else replace(plain, scaling=right.scaling)
    others = None
    if {"short_factor", "long_factor"} <= parameters.keys():  # HF chooses by the length of what is computed
        for used, unused in (("short", "long"), ("long", "short")):
            same = {**parameters, f"{unused}_factor": parameters[f"{used}_factor"]}
            changed_rotation = with_parameters(wrong, right, same)
            if changed_rotation is not None and not _is_same(changed_rotation, right):
                others, cause = (
                    changed_rotation,
                    f"rope scaling: the {used} factors are used where the {unused} ones belong",
                )
                yield Hypothesis(cause=cause, output=changed_rotation.turn(wrong.inputs[0], wrong.positions))
    for cause, changed, num_fitted in (*_other_values(parameters), *_other_types(wrong, right, parameters, meant)):
        changed_rotation = with_parameters(wrong, right, changed)
        if changed_rotation is not None and not any(
            _is_same(changed_rotation, item) for item in (plain, kept, others)
        ):  # these have names
            yield Hypothesis(
                cause=cause, output=changed_rotation.turn(wrong.inputs[0], wrong.positions), num_fitted=num_fitted
            )


def _is_same(one: Rotation, another: Rotation | None) -> bool:
    return (
        another is not None
        and one.scaling == another.scaling
        and one.frequencies.shape == another.frequencies.shape
        and torch.allclose(one.frequencies, another.frequencies, rtol=1e-6, atol=0)
    )


def _other_values(parameters: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Parameters that config.json gives, two of them exchanged, or one of them at another usual value."""
    for first, second in _PAIRS:
        if {first, second} <= parameters.keys():
            exchanged = {**parameters, first: parameters[second], second: parameters[first]}
            yield f"rope scaling: {first} and {second} are exchanged", exchanged, 0
    for name, values in _USUAL_VALUES.items():
        meant = parameters.get(name)
        for value in values if isinstance(meant, int | float) else ():
            if value != meant:
                cause = f"rope scaling: {name} is {value:g} instead of {meant:g}"
                yield cause, {**parameters, name: value}, 0
    if parameters.get("rope_type") == "yarn":  # gpt-oss leaves them as they are; llama.cpp rounds them always
        truncates = bool(parameters.get("truncate", True))
        cause = f"rope scaling: the ends of yarn's ramp are {'not ' * truncates}rounded to whole dimensions"
        yield cause, {**parameters, "truncate": not truncates}, 0


def _other_types(
    wrong: WrongOperation, right: Rotation, parameters: dict[str, Any], meant: str
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Scalings that config.json does not ask for."""
    length = getattr(wrong.config, "max_position_embeddings", None)
    base = {"rope_theta": parameters["rope_theta"], "original_max_position_embeddings": length}
    instead = "which config.json does not ask for" if meant == "default" else f"instead of {meant}"
    for name in ("linear", "yarn"):
        for factor in _FACTORS if name != meant else ():
            cause = f"rope scaling: {name} with factor {factor:g}, {instead}"
            yield cause, {**base, "rope_type": name, "factor": factor}, 0
    fitted = _fitted_stretch(wrong, right) if wrong.can_be_fitted else None
    if fitted is not None:
        cause = f"rope scaling: linear with factor {fitted:g}, {instead}"
        yield cause, {**base, "rope_type": "linear", "factor": fitted}, 1


def _fitted_stretch(wrong: WrongOperation, right: Rotation) -> float | None:
    """Return the factor under which the unscaled pairs turn most nearly as they did, to three digits."""
    parameters = rope_parameters(wrong, right)
    plain = with_parameters(wrong, right, {"rope_type": "default", "rope_theta": parameters["rope_theta"]})
    if plain is None:
        return None
    turned, frequencies = turned_by(wrong, right), plain.frequencies.to(torch.float64)
    if turned.shape[1] != len(frequencies):
        return None

    def error(factor: float) -> float:
        return -_agreement(turned, wrong.positions[:, None] * frequencies / factor)

    factor = fit_by_search(_GRID_OF_FACTORS, error)
    rounded = float(f"{factor:.3g}")
    return None if rounded in (1.0, *_FACTORS) else rounded


def _agreement(turned: torch.Tensor, phases: torch.Tensor) -> float:
    """Return how nearly the pairs [R, P], as complex numbers, turned by these angles."""
    return float((turned * torch.polar(torch.ones_like(phases), -phases)).real.sum())


@with_rotation
def wrong_theta(wrong: WrongOperation, right: Rotation) -> Causes:
    """The base of the frequencies is another: one that models use, or one fitted to the rows.

    Scaled frequencies are scaled anew for the base, or keep the factors of the right one, as those in a file do.

    Causes: wrong rope theta: *value* instead of *value*; whether the factors of the rope scaling are kept.
    """
    parameters = rope_parameters(wrong, right)
    if "rope_theta" not in parameters:
        return
    meant = float(parameters["rope_theta"])
    for based_on, kept in ((_with_theta, ""), (_with_theta_and_factors, "the factors of the rope scaling are kept")):
        if kept and parameters.get("rope_type", "default") == "default":
            continue
        fitted = _fitted_thetas(wrong, right, based_on)
        for theta in dict.fromkeys((*_THETAS, *fitted)):
            changed = based_on(wrong, right, theta) if theta != meant else None
            if changed is not None:
                yield Hypothesis(
                    cause=f"wrong rope theta: {theta:g} instead of {meant:g}",
                    output=changed.turn(wrong.inputs[0], wrong.positions),
                    detail=kept,
                    num_fitted=0 if theta in _THETAS else 1,
                    is_vague=theta in fitted[1:],  # that of two digits fits as well, or better
                )


def _with_theta(wrong: WrongOperation, right: Rotation, theta: float) -> Rotation | None:
    return with_parameters(wrong, right, {**rope_parameters(wrong, right), "rope_theta": theta})


def _with_theta_and_factors(wrong: WrongOperation, right: Rotation, theta: float) -> Rotation | None:
    """Return the rotation of another base whose frequencies are scaled by the factors of the right one."""
    meant = float(rope_parameters(wrong, right)["rope_theta"])
    exponents = torch.arange(len(right.frequencies), dtype=torch.float64) / len(right.frequencies)
    return replace(right, frequencies=(right.frequencies * (meant / theta) ** exponents).to(torch.float32))


def _fitted_thetas(
    wrong: WrongOperation, right: Rotation, based_on: Callable[[WrongOperation, Rotation, float], Rotation | None]
) -> list[float]:
    """Return the base under which the pairs turn most nearly as they did, rounded to two digits and to six."""
    if not wrong.can_be_fitted:
        return []
    turned = turned_by(wrong, right)

    def error(theta: float) -> float:
        changed = based_on(wrong, right, theta)
        if changed is None:
            return 0.0
        return -_agreement(turned, wrong.positions[:, None] * changed.frequencies.to(torch.float64))

    theta = fit_by_search(_GRID_OF_THETAS, error)
    return [float(f"{theta:.2g}"), float(f"{theta:.6g}")]


@with_rotation
def partial_rotary(wrong: WrongOperation, right: Rotation) -> Causes:
    """Partial rotary: the first *n* of *n* elements turn."""
    theta = rope_parameters(wrong, right).get("rope_theta")
    for share in (0.25, 0.5, 0.75, 1.0):
        dim = int(right.head_dim * share) // 2 * 2
        if not dim or dim == 2 * len(right.frequencies):  # that many turn as they should: what differs is no part
            continue
        candidates = [right.frequencies[: dim // 2]]
        if theta is not None:
            candidates.insert(0, float(theta) ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim))
        for frequencies in candidates:
            if len(frequencies) == dim // 2:
                changed = replace(right, frequencies=frequencies)
                yield Hypothesis(
                    cause=f"partial rotary: the first {dim} of {right.head_dim} elements turn",
                    output=changed.turn(wrong.inputs[0], wrong.positions),
                )


def rope_parameters(wrong: WrongOperation, right: Rotation) -> dict[str, Any]:
    """Return the rope parameters of the config, where it has them by type of layer those of the rotation's own type."""
    parameters = getattr(wrong.config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return {}
    return dict(parameters.get(_layer_type(right), parameters))


def _layer_type(rotation: Rotation) -> str:
    """Return the type of layer that a rotation belongs to; empty if all layers have the same."""
    return rotation.name.removesuffix("inv_freq").rstrip("_")


def with_parameters(wrong: WrongOperation, right: Rotation, parameters: dict[str, Any]) -> Rotation | None:
    """Return the rotation that HF's own code makes of other rope parameters; None if it makes none.

    Every layer and schedule asks for the same ones, and HF takes half a millisecond for each: they are remembered.
    """
    known = _MADE.setdefault(right.module, {})
    key = f"{right.name} {sorted(parameters.items())}"
    if key not in known:
        known[key] = _make(wrong.config, right, parameters)
    made = known[key]
    return made and replace(
        made, is_interleaved=right.is_interleaved, is_regrouped=right.is_regrouped, head_dim=right.head_dim
    )


def _make(config: Any, right: Rotation, parameters: dict[str, Any]) -> Rotation | None:
    changed, kind = copy.copy(config), _layer_type(right)
    changed.rope_parameters = {**config.rope_parameters, kind: dict(parameters)} if kind else dict(parameters)
    try:
        module = type(right.module)(changed)
    except Exception:  # a family whose module needs more than its config
        return None
    frequencies = getattr(module, right.name).detach().cpu().to(torch.float32)
    scaling = float(getattr(module, right.name.replace("inv_freq", "attention_scaling"), 1.0))
    return replace(right, frequencies=frequencies, scaling=scaling, module=module)


@with_rotation
def of_other_layers(wrong: WrongOperation, right: Rotation) -> Causes:
    """Rotary is that of *type* layers, where the model has one for each type of layer."""
    for name, buffer in right.module.named_buffers(recurse=False):
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and name != right.name:
            changed = replace(
                right,
                name=name,
                frequencies=buffer.detach().cpu().to(torch.float32),
                scaling=float(getattr(right.module, name.replace("inv_freq", "attention_scaling"), 1.0)),
            )
            yield Hypothesis(
                cause=f"rotary is that of {_layer_type(changed)} layers",
                output=changed.turn(wrong.inputs[0], wrong.positions),
            )
