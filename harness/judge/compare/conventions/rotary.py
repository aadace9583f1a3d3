"""Conventions of rotary embeddings: the angles through another order of float32, or in float64.

HF computes theta^-x and position times frequency in float32. An angle of 10,000 has an error of 0.0005 there, which
is 10,000 roundings of the rotated values: an engine that computes the same angle in another way is far off and right.

`R` rows, `P` pairs of elements that turn together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows
from harness.oracle.rotation import Rotation, rotations

_MODEL = KINDS[Kind.ROTARY].error_model or ErrorModel(roundings=3)
_SAME = 1e-5
"""Relative distance within which a rotation is the one in HF's forward."""
_ROUNDINGS_OF_ANGLE = 2
"""Float32 roundings of an angle that every order is allowed: scaled frequencies are computed in several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Angles:
    """The factors of the angles."""

    positions: torch.Tensor
    """[R] int64."""
    exponents: torch.Tensor
    """[P] float64: x in theta^-x."""
    theta: float
    frequencies: torch.Tensor
    """[P] float32: HF's frequencies."""
    stretch: torch.Tensor
    """[P] float64: the factor of rope scaling for each frequency."""


def _in_float64(angles: _Angles) -> torch.Tensor:
    return angles.positions[:, None].to(torch.float64) * angles.frequencies.to(torch.float64)


def _all_in_float64(angles: _Angles) -> torch.Tensor:
    return angles.positions[:, None].to(torch.float64) * (angles.theta**-angles.exponents * angles.stretch)


def _frequencies_in_float64(angles: _Angles) -> torch.Tensor:
    frequencies = (angles.theta**-angles.exponents * angles.stretch).to(torch.float32)
    return (angles.positions[:, None].to(torch.float32) * frequencies).to(torch.float64)


def _divided(angles: _Angles) -> torch.Tensor:
    wavelengths = angles.theta ** angles.exponents.to(torch.float32) / angles.stretch.to(torch.float32)
    return (angles.positions[:, None].to(torch.float32) / wavelengths).to(torch.float64)


def _by_logarithm(angles: _Angles) -> torch.Tensor:
    logarithm = torch.tensor(angles.theta, dtype=torch.float32).log()
    frequencies = (-angles.exponents.to(torch.float32) * logarithm).exp() * angles.stretch.to(torch.float32)
    return (angles.positions[:, None].to(torch.float32) * frequencies).to(torch.float64)


def _one_from_another(angles: _Angles) -> torch.Tensor:
    """As in ggml: the angle of the first pair is the position, each next angle is the last one times theta^(-2/H)."""
    factor = torch.tensor(angles.theta, dtype=torch.float32) ** -(angles.exponents[1:2].to(torch.float32))
    angle, columns = angles.positions.to(torch.float32), []
    for _ in angles.exponents:
        columns.append(angle)
        angle = angle * factor if len(factor) else angle
    return (torch.stack(columns, dim=1) * angles.stretch.to(torch.float32)).to(torch.float64)


OWN_POSITIONS = "rotary for the row's own position, and not for that of the token that it looks ahead to"
_NEAR = 0.05
"""Relative distance within which rows count as rotated for some positions, in any dtype."""
OTHER_ORDER = "rotary angles in float64, or through another order of float32"
_ORDERS = (
    _in_float64, _all_in_float64, _frequencies_in_float64, _divided, _by_logarithm, _one_from_another,
)  # fmt: skip
"""[R, P] float64 angles each."""


def _other_orders(subject: SuspectRows) -> Iterator[Rounding]:
    """Judge the rows by the order that they are nearest to; a few rows rarely distinguish two orders."""
    x = subject.inputs[0].flatten(1).to("cpu", torch.float64)
    rotation = _rotation_of(subject, x)
    if rotation is not None:
        angles = _angles(subject, rotation)
        allowance = _allowance(angles, rotation.pairs(rotation.heads(x)), subject.dtype)
        actual = subject.actual.to("cpu", torch.float64).nan_to_num()
        expected = partial(_nearest, rotation, x, angles, actual)
        yield Rounding(name=OTHER_ORDER, model=_MODEL, expected=expected, allowance=allowance)


def _nearest(rotation: Rotation, x: torch.Tensor, angles: _Angles, actual: torch.Tensor) -> torch.Tensor:
    turned = [rotation.turned(rotation.heads(x), *rotation.table(order(angles))) for order in _ORDERS]
    return min(turned, key=lambda rows: float((rows - actual).norm()))


def _rotation_of(subject: SuspectRows, x: torch.Tensor) -> Rotation | None:
    """Return the rotation that turns the input into the expected rows; None if the model has none."""
    expected = subject.expected.to("cpu", torch.float64)
    size = subject.hf.head_dim_of(subject.operation.layer)
    if x.shape != expected.shape or x.shape[1] % size:
        return None
    for rotation in rotations(subject.hf, size):
        error = (rotation.turn(x, subject.positions) - expected).norm(dim=1)
        if bool((error <= _SAME * expected.norm(dim=1)).all()):
            return rotation
    return None


def _angles(subject: SuspectRows, rotation: Rotation) -> _Angles:
    """Return the factors of the angles; if the model has no single theta, it is derived from HF's frequencies."""
    num = len(rotation.frequencies)
    exponents = torch.arange(0, num, dtype=torch.float64) / num
    parameters = getattr(subject.hf.config_of(subject.operation.layer), "rope_parameters", None) or {}
    theta = parameters.get("rope_theta")
    if theta is None:
        theta = float(rotation.frequencies[1].to(torch.float64) ** -num) if num > 1 else 1.0
    plain = 1.0 / (float(theta) ** exponents.to(torch.float32))
    stretch = rotation.frequencies.to(torch.float64) / plain.to(torch.float64)
    is_plain = (stretch - 1).abs() < 4 * torch.finfo(torch.float32).eps
    return _Angles(
        positions=subject.positions,
        exponents=exponents,
        theta=float(theta),
        frequencies=rotation.frequencies,
        stretch=torch.where(is_plain, 1.0, stretch),
    )


def _allowance(angles: _Angles, pairs_RNP2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R]: roundings that an error of the angles makes: each pair moves by its size times the angle's error."""
    angle = _in_float64(angles) * torch.finfo(torch.float32).eps / 2 * _ROUNDINGS_OF_ANGLE
    moved = (pairs_RNP2.norm(dim=-1) * angle[:, None]).flatten(1).norm(dim=1)
    size = pairs_RNP2.flatten(1).norm(dim=1)
    return torch.where(size > 0, moved / size, 0.0) / rounding_unit(dtype)


def _own_positions(subject: SuspectRows) -> Iterator[Rounding]:
    """Judge queries and keys of a layer that predicts further tokens by their rows' own positions, if both fit."""
    ahead = subject.operation.tokens_ahead
    x = subject.inputs[0].flatten(1).to("cpu", torch.float64)
    rotation = _rotation_of(subject, x) if ahead else None
    if rotation is not None and _are_all_turned(subject, rotation, subject.positions - ahead):
        angles = replace(_angles(subject, rotation), positions=subject.positions - ahead)
        allowance = _allowance(angles, rotation.pairs(rotation.heads(x)), subject.dtype)
        expected = partial(rotation.turn, x, subject.positions - ahead)
        yield Rounding(name=OWN_POSITIONS, model=_MODEL, expected=expected, allowance=allowance)


def _are_all_turned(subject: SuspectRows, rotation: Rotation, positions: torch.Tensor) -> bool:
    """Whether queries and keys of the layer are rotated for these positions: attention sees only their differences."""
    operations = [op for op in subject.hf.graph.of_layer(subject.operation.layer) if op.kind is Kind.ROTARY]
    for operation in operations:
        source, turned = (subject.recorded(tap) for tap in (operation.inputs[0], operation.tap))
        if source is None or turned is None:
            return False
        source, turned = (item.flatten(1).to("cpu", torch.float64) for item in (source, turned))
        if not float((rotation.turn(source, positions) - turned).norm()) <= _NEAR * float(turned.norm()):
            return False
    return len(operations) > 1


CONVENTIONS = (
    Convention(name=OTHER_ORDER, kinds=(Kind.ROTARY,), alternatives=_other_orders),
    Convention(name=OWN_POSITIONS, kinds=(Kind.ROTARY,), alternatives=_own_positions),
)
