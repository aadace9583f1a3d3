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
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.rotary.rotation import Causes, turned_by, turned_to, with_rotation
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
    kind, plain = rope_parameters(wrong, right).get("rope_type", "default"), _unscaled(wrong, right)
    if plain is None or kind == "default":
        return
    yield turned_to(wrong, plain, f"rope scaling ({kind}) is ignored")
    if plain.scaling != right.scaling:
        kept = replace(plain, scaling=right.scaling)
        yield turned_to(wrong, kept, f"rope scaling ({kind}) is ignored but for its factor of cos and sin")


def _unscaled(wrong: WrongOperation, right: Rotation) -> Rotation | None:
    """Return the rotation of the same base without rope scaling; None if the config names no base."""
    theta = rope_parameters(wrong, right).get("rope_theta")
    return None if theta is None else with_parameters(wrong, right, {"rope_type": "default", "rope_theta": theta})


@with_rotation
def other_scaling(wrong: WrongOperation, right: Rotation) -> Causes:
    """The frequencies are scaled in another way than config.json says, or by another factor.

    Causes: rope scaling: *parameter* is *value* instead of *value*; two of them are exchanged; the short factors
    (LongRoPE) are used where the long ones belong, or the reverse; rope scaling: linear or yarn with factor *value*,
    which config.json does not ask for; the ends of yarn's ramp are rounded to whole dimensions, or are not.
    """
    parameters, plain = rope_parameters(wrong, right), _unscaled(wrong, right)
    if "rope_theta" not in parameters:
        return
    named = [] if plain is None else [plain, replace(plain, scaling=right.scaling)]
    is_of_length = {"short_factor", "long_factor"} <= parameters.keys()  # HF chooses by the length of what is computed
    for used, unused in (("short", "long"), ("long", "short")) if is_of_length else ():
        changed = with_parameters(wrong, right, {**parameters, f"{unused}_factor": parameters[f"{used}_factor"]})
        if changed is not None and not _is_same(changed, right):
            named.append(changed)
            cause = f"rope scaling: the {used} factors are used where the {unused} ones belong"
            yield turned_to(wrong, changed, cause)
    for cause, others, num_fitted in (*_other_values(parameters), *_other_types(wrong, right, parameters, plain)):
        changed = with_parameters(wrong, right, others)
        if changed is not None and not any(_is_same(changed, item) for item in named):
            yield turned_to(wrong, changed, cause, num_fitted=num_fitted)


def _is_same(one: Rotation, another: Rotation) -> bool:
    is_like = one.scaling == another.scaling and one.frequencies.shape == another.frequencies.shape
    return is_like and torch.allclose(one.frequencies, another.frequencies, rtol=1e-6, atol=0)


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
    wrong: WrongOperation, right: Rotation, parameters: dict[str, Any], plain: Rotation | None
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Scalings that config.json does not ask for, the last by the factor under which the rows are nearest."""
    meant = str(parameters.get("rope_type", "default"))
    length = getattr(wrong.config, "max_position_embeddings", None)
    base = {"rope_theta": parameters["rope_theta"], "original_max_position_embeddings": length}
    instead = "which config.json does not ask for" if meant == "default" else f"instead of {meant}"
    tried = [(name, factor, 0) for name in ("linear", "yarn") if name != meant for factor in _FACTORS]
    if plain is not None and wrong.can_be_fitted and plain.frequencies.shape == right.frequencies.shape:
        stretch = _fitted(wrong, right, _GRID_OF_FACTORS, lambda by: replace(plain, frequencies=plain.frequencies / by))
        tried += [] if (factor := float(f"{stretch:.3g}")) in (1.0, *_FACTORS) else [("linear", factor, 1)]
    for name, factor, num_fitted in tried:
        cause = f"rope scaling: {name} with factor {factor:g}, {instead}"
        yield cause, {**base, "rope_type": name, "factor": factor}, num_fitted


def _fitted(
    wrong: WrongOperation, right: Rotation, grid: list[float], rotation_of: Callable[[float], Rotation | None]
) -> float:
    """Return the number by whose rotation the pairs turn most nearly as they did."""
    turned = turned_by(wrong, right)

    def error(number: float) -> float:
        changed = rotation_of(number)
        if changed is None:
            return 0.0
        phases = wrong.positions[:, None] * changed.frequencies.to(torch.float64)
        return -float((turned * torch.polar(torch.ones_like(phases), -phases)).real.sum())

    return fit_by_search(grid, error)


@with_rotation
def wrong_theta(wrong: WrongOperation, right: Rotation) -> Causes:
    """The base of the frequencies is another: one that models use, or one fitted to the rows.

    Scaled frequencies are scaled anew for the base, or keep the factors of the right one, as those in a file do.

    Causes: wrong rope theta: *value* instead of *value*; whether the factors of the rope scaling are kept.
    """
    parameters = rope_parameters(wrong, right)
    if "rope_theta" not in parameters:
        return
    meant, num_pairs = float(parameters["rope_theta"]), len(right.frequencies)

    def scaled_anew(theta: float) -> Rotation | None:
        return with_parameters(wrong, right, {**parameters, "rope_theta": theta})

    def scaled_alike(theta: float) -> Rotation:
        exponents = torch.arange(num_pairs, dtype=torch.float64) / num_pairs
        return replace(right, frequencies=(right.frequencies * (meant / theta) ** exponents).to(torch.float32))

    ways: dict[str, Callable[[float], Rotation | None]] = {"": scaled_anew}
    if parameters.get("rope_type", "default") != "default":
        ways["the factors of the rope scaling are kept"] = scaled_alike
    for kept, rotation_of in ways.items():
        best = [_fitted(wrong, right, _GRID_OF_THETAS, rotation_of)] if wrong.can_be_fitted else []
        fitted = [float(f"{theta:.{digits}g}") for theta in best for digits in (2, 6)]
        for theta in dict.fromkeys((*_THETAS, *fitted)):
            changed = rotation_of(theta) if theta != meant else None
            if changed is not None:
                cause, num_fitted = f"wrong rope theta: {theta:g} instead of {meant:g}", int(theta not in _THETAS)
                is_vague = theta in fitted[1:]  # that of two digits fits as well, or better
                yield turned_to(wrong, changed, cause, detail=kept, num_fitted=num_fitted, is_vague=is_vague)


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
                cause = f"partial rotary: the first {dim} of {right.head_dim} elements turn"
                yield turned_to(wrong, replace(right, frequencies=frequencies), cause)


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
    return _of_buffer(replace(right, module=module), right.name)


def _of_buffer(right: Rotation, name: str) -> Rotation:
    """Return the rotation by another buffer of frequencies of the same module."""
    frequencies = getattr(right.module, name).detach().cpu().to(torch.float32)
    scaling = float(getattr(right.module, name.replace("inv_freq", "attention_scaling"), 1.0))
    return replace(right, name=name, frequencies=frequencies, scaling=scaling)


@with_rotation
def of_other_layers(wrong: WrongOperation, right: Rotation) -> Causes:
    """Rotary is that of *type* layers, where the model has one for each type of layer."""
    for name, _ in right.module.named_buffers(recurse=False):
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and name != right.name:
            changed = _of_buffer(right, name)
            yield turned_to(wrong, changed, f"rotary is that of {_layer_type(changed)} layers")
