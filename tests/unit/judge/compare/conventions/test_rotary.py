"""Rotary angles in every order of rounding, against loops over positions and pairs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.conventions import rotary
from harness.judge.compare.conventions.entry import SuspectRows
from harness.judge.compare.conventions.rotary import CONVENTIONS, OTHER_ORDER, OWN_POSITIONS

from ..judgements import draw

ORDERS, POSITION_ORDERS = (convention.alternatives for convention in CONVENTIONS)
F32 = np.float32
SIZE, PAIRS, HEADS, THETA = 8, 4, 3, 10_000.0
POSITIONS = (0, 1, 700, 3000)
EPS = float(torch.finfo(torch.float32).eps)


def frequencies_of(theta=THETA, stretch=None, pairs=PAIRS):
    plain = 1.0 / (theta ** (torch.arange(0, pairs, dtype=torch.float64) / pairs).float())
    return plain if stretch is None else plain * torch.tensor(stretch)


def model_of(frequencies, *, theta=THETA, size=SIZE, scaling=1.0):
    module = nn.Module()
    module.register_buffer("inv_freq", frequencies)
    module.attention_scaling = scaling
    parameters = None if theta is None else {"rope_theta": theta}
    config = SimpleNamespace(rope_parameters=parameters)
    return SimpleNamespace(model=module, head_dim_of=lambda _layer: size, config_of=lambda _layer: config)


X = draw(len(POSITIONS), HEADS * SIZE)


def turned(x, angles, scaling=1.0):
    """Rows [R, N * H] whose pairs, half a head apart, turn by angles [R][P]; what is after the pairs stays."""
    out = x.clone().view(len(x), -1, SIZE)
    num = len(angles[0])
    for row, row_angles in enumerate(angles):
        for pair, angle in enumerate(row_angles):
            a, b = (x.view(len(x), -1, SIZE)[row, :, at] for at in (pair, pair + num))
            cos, sin = math.cos(angle) * scaling, math.sin(angle) * scaling
            out[row, :, pair], out[row, :, pair + num] = a * cos - b * sin, b * cos + a * sin
    return out.flatten(1)


def by_position(angle):
    """Angles [R][P] of a function of position, pair."""
    return [[float(angle(position, pair)) for pair in range(PAIRS)] for position in POSITIONS]


def hf_angles(frequencies):
    return by_position(lambda position, pair: F32(position) * F32(frequencies[pair]))


def orders(frequencies, theta, stretch):
    """Angles of every order, by its definition."""

    def repeated(position, pair):
        angle, factor = F32(position), F32(theta) ** -F32(1 / PAIRS)
        for _ in range(pair):
            angle = F32(angle * factor)
        return F32(angle * F32(stretch[pair]))

    exponents, kept = [pair / PAIRS for pair in range(PAIRS)], [float(x) for x in frequencies]
    exact = [theta**-x * factor for x, factor in zip(exponents, stretch, strict=True)]
    logarithm = np.log(F32(theta))
    return [
        by_position(lambda position, pair: position * kept[pair]),
        by_position(lambda position, pair: position * exact[pair]),
        by_position(lambda position, pair: F32(position) * F32(exact[pair])),
        by_position(lambda position, pair: F32(position) / (F32(theta) ** F32(exponents[pair]) / F32(stretch[pair]))),
        by_position(
            lambda position, pair: F32(position) * (np.exp(-F32(exponents[pair]) * logarithm) * F32(stretch[pair]))
        ),
        by_position(repeated),
    ]


def held(hf, actual, expected, *, x=X, dtype=torch.float32):
    operation = Operation(tap="q_rope", kind=Kind.ROTARY, inputs=("q",), source="q")
    subject = SuspectRows(
        hf=hf, operation=operation, dtype=dtype, actual=actual, expected=expected, rows=torch.arange(len(x)),
        positions=torch.tensor(POSITIONS), inputs=[x],
    )  # fmt: skip
    return list(ORDERS(subject))


STRETCHED = (1.0, 1.0, 0.5, 0.125)


@pytest.mark.parametrize("stretch", [(1.0,) * PAIRS, STRETCHED])
@pytest.mark.parametrize("order", range(6))
def test_rows_are_judged_by_the_nearest_order(order, stretch):
    frequencies = frequencies_of(stretch=stretch)
    hf, expected = model_of(frequencies), turned(X, hf_angles(frequencies))
    actual = turned(X, orders(frequencies, THETA, stretch)[order])
    (alternative,) = held(hf, actual, expected, x=X.unflatten(1, (HEADS, SIZE)))
    assert alternative.name == OTHER_ORDER
    # Powers and exponentials of float32 may differ by a rounding or two: 1.2e-7 of an angle of 3,000.
    torch.testing.assert_close(alternative.expected(), actual, rtol=0, atol=3e-3)


@pytest.mark.parametrize("stretch", [(1.0,) * PAIRS, STRETCHED])
def test_each_order_is_its_definition(stretch):
    """To a rounding or two of float32, and much nearer to it than angles of a wrong theta would be."""
    frequencies = frequencies_of(stretch=stretch)
    angles = rotary._Angles(
        positions=torch.tensor(POSITIONS), exponents=torch.arange(0, PAIRS, dtype=torch.float64) / PAIRS,
        theta=THETA, frequencies=frequencies, stretch=torch.tensor(stretch, dtype=torch.float64),
    )  # fmt: skip
    for at, (order, expected) in enumerate(zip(rotary._ORDERS, orders(frequencies, THETA, stretch), strict=True)):
        angle = order(angles)
        assert angle.dtype is torch.float64
        tolerance = 1e-14 if at < 3 else 4 * EPS
        torch.testing.assert_close(angle, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=0)
        assert torch.equal(angle, angle.float().double()) == (at >= 2), "which orders are in float32"


def test_one_pair_turns_by_the_position():
    one = rotary._Angles(
        positions=torch.tensor([3]), exponents=torch.zeros(1, dtype=torch.float64), theta=5.0,
        frequencies=torch.ones(1),
        stretch=torch.full((1,), 2.0, dtype=torch.float64),
    )  # fmt: skip
    assert rotary._ORDERS[-1](one).tolist() == [[6.0]]


def test_what_the_angles_are_made_of():
    """Frequencies that are the plain ones to four roundings are the plain ones."""
    subject = SimpleNamespace(
        hf=model_of(None), operation=Operation(tap="q_rope", kind=Kind.ROTARY), positions=torch.tensor(POSITIONS)
    )
    nearly = frequencies_of(stretch=(1 + 3 * EPS, 1 - 3 * EPS, 1 + 8 * EPS, 0.5))
    angles = rotary._angles(subject, SimpleNamespace(frequencies=nearly))
    assert angles.exponents.tolist() == [0, 0.25, 0.5, 0.75]
    assert (angles.theta, angles.frequencies) == (THETA, nearly)
    assert angles.stretch[:2].tolist() == [1.0, 1.0]
    torch.testing.assert_close(
        angles.stretch[2:], torch.tensor([1 + 8 * EPS, 0.5], dtype=torch.float64), rtol=EPS, atol=0
    )
    assert float(angles.stretch[2]) != 1.0


@pytest.mark.parametrize(("pairs", "theta"), [(4, 500.0), (2, 500.0), (1, 1.0)])
def test_a_missing_theta_is_derived_from_the_frequencies(pairs, theta):
    subject = SimpleNamespace(
        hf=model_of(None, theta=None),
        operation=Operation(tap="q_rope", kind=Kind.ROTARY),
        positions=torch.tensor(POSITIONS),
    )
    angles = rotary._angles(subject, SimpleNamespace(frequencies=frequencies_of(500.0, pairs=pairs)))
    assert angles.theta == pytest.approx(theta, rel=1e-6)
    torch.testing.assert_close(angles.stretch, torch.ones(pairs, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("pairs", [PAIRS, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_is_what_two_roundings_of_the_angles_move(pairs, dtype):
    """Of heads that turn in part, as a share of the part."""
    frequencies = frequencies_of(pairs=pairs)
    expected = turned(X, [[float(F32(position) * F32(f)) for f in frequencies] for position in POSITIONS])
    x = X.clone()
    x[0] = 0
    expected[0] = 0
    (alternative,) = held(model_of(frequencies), expected, expected, x=x, dtype=dtype)
    for row, position in enumerate(POSITIONS):
        moved = size = 0.0
        for head in x[row].view(HEADS, SIZE):
            for pair in range(pairs):
                length = float(head[pair] ** 2 + head[pair + pairs] ** 2)
                moved += length * (position * float(frequencies[pair]) * EPS) ** 2
                size += length
        allowance = math.sqrt(moved / size) / rounding_unit(dtype) if size else 0.0
        assert float(alternative.allowance[row]) == pytest.approx(allowance, rel=1e-9)


def test_what_is_no_rotation_of_the_model_has_no_other_order():
    frequencies = frequencies_of()
    hf, expected = model_of(frequencies), turned(X, hf_angles(frequencies))
    assert len(held(hf, expected, expected)) == 1
    assert len(held(hf, expected, expected * (1 + 0.9e-5))) == 1
    assert held(hf, expected, expected * (1 + 1.1e-5)) == []
    one_row = expected.clone()
    one_row[2] *= 1 + 2e-5
    assert held(hf, expected, one_row) == []
    assert held(hf, expected[:, :SIZE], expected[:, :SIZE]) == [], "another shape"
    assert held(model_of(frequencies, size=7), expected, expected) == [], "no whole heads"


def test_values_that_are_not_finite_are_no_nearer_to_any_order():
    frequencies = frequencies_of()
    expected = turned(X, hf_angles(frequencies))
    actual = turned(X, orders(frequencies, THETA, (1.0,) * PAIRS)[0])
    broken = actual.clone()
    broken[1, 3] = torch.nan
    (alternative,) = held(model_of(frequencies), broken, expected)
    torch.testing.assert_close(alternative.expected(), actual, rtol=0, atol=1e-9)


def test_cosines_are_scaled_as_the_models_are():
    frequencies = frequencies_of()
    expected = turned(X, hf_angles(frequencies), scaling=1.5)
    (alternative,) = held(model_of(frequencies, scaling=1.5), expected, expected)
    torch.testing.assert_close(alternative.expected(), expected, rtol=0, atol=3e-3)


def of_a_layer_that_looks_ahead(shifts, *, ahead=1, without=()):
    """Rows of `q_rope`, and what was recorded: each tap turned for the position of the token ahead, less its shift."""
    hf = model_of(frequencies_of())
    taps = {
        name: Operation(tap=f"l.0.{name}_rope", kind=Kind.ROTARY, inputs=(name,), source=name, tokens_ahead=ahead)
        for name in shifts
    }
    hf.graph = Graph(tuple(taps.values()))
    at = {
        name: [[(p - shift) * float(f) for f in frequencies_of()] for p in POSITIONS] for name, shift in shifts.items()
    }
    recorded = {f"l.0.{name}_rope": turned(X, at[name]) for name in shifts} | dict.fromkeys(shifts, X)
    subject = SuspectRows(
        hf=hf, operation=taps["q"], dtype=torch.float32, actual=recorded["l.0.q_rope"],
        expected=turned(X, hf_angles(frequencies_of())), rows=torch.arange(len(X)), positions=torch.tensor(POSITIONS),
        inputs=[X], recorded=lambda tap: None if tap in without else recorded[tap],
    )  # fmt: skip
    return list(POSITION_ORDERS(subject)), subject


def test_a_layer_that_looks_ahead_may_count_its_rows_own_positions():
    (actual,), subject = of_a_layer_that_looks_ahead({"q": 1, "k": 1})
    assert actual.name == OWN_POSITIONS
    torch.testing.assert_close(actual.expected(), subject.actual.double(), rtol=0, atol=3e-3)
    (actual,), _ = of_a_layer_that_looks_ahead({"q": 2, "k": 2}, ahead=2)
    assert actual.name == OWN_POSITIONS


@pytest.mark.parametrize(
    ("shifts", "options"),
    [
        ({"q": 1, "k": 0}, {}),
        ({"q": 0, "k": 1}, {}),
        ({"q": 2, "k": 2}, {}),
        ({"q": 1}, {}),
        ({"q": 1, "k": 1}, {"without": ("l.0.k_rope",)}),
        ({"q": 1, "k": 1}, {"ahead": 0}),
    ],
)
def test_it_must_do_so_for_queries_and_keys_and_be_seen_to(shifts, options):
    assert of_a_layer_that_looks_ahead(shifts, **options)[0] == []
