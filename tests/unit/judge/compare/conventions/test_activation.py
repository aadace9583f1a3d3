"""Activations whose share of their input is as exact as one, and not as its own value."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from harness.base.metrics import rounding_unit, row_errors
from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions.activation import ABSOLUTE_NORMAL, ABSOLUTE_SIGMOID, CONVENTIONS
from harness.judge.compare.conventions.entry import SuspectRows

from ..judgements import draw

ROWS, WIDTH = 4, 32
(CONVENTION,) = CONVENTIONS
UNIT = rounding_unit(torch.float32)


def found(expected, *inputs, dtype=torch.float32):
    subject = SuspectRows(
        hf=None, operation=Operation(tap="act", kind=Kind.ACTIVATION, inputs=("x",), source="act"), dtype=dtype,
        actual=expected, expected=expected, rows=torch.arange(ROWS), positions=torch.arange(ROWS), inputs=list(inputs),
        declared=Numerics(),
    )  # fmt: skip
    return list(CONVENTION.roundings(subject))


@pytest.mark.parametrize(("of", "name"), [(silu, ABSOLUTE_SIGMOID), (gelu, ABSOLUTE_NORMAL)])
def test_the_share_is_found_in_every_form(of, name):
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    for inputs in ((gate, up), (up, gate), (torch.cat([gate, up], 1),), (torch.cat([up, gate], 1),)):
        (rounding,) = found(of(gate) * up, *inputs)
        assert rounding.name == name
        assert torch.equal(rounding.expected(), of(gate) * up)
    (alone,) = found(of(gate), gate)
    assert alone.name == name


@pytest.mark.parametrize(("of", "share"), [(silu, 2.0**-23), (gelu, 2.0**-21)])
def test_the_room_is_that_of_a_share_that_is_off_everywhere_by_as_much(of, share):
    """Rows whose inputs are far below zero lose the most."""
    gate, up = draw(ROWS, WIDTH) - torch.arange(ROWS)[:, None] * 1.5, draw(ROWS, WIDTH, seed=1)
    expected = of(gate) * up
    (rounding,) = found(expected, gate, up)
    off = expected + share * gate * up * torch.randint(0, 2, gate.shape).mul(2).sub(1)
    torch.testing.assert_close(rounding.allowance, row_errors(off, expected) / UNIT, rtol=1e-6, atol=1e-6)
    assert rounding.allowance[-1] > 10 * rounding.allowance[0]


def test_torchs_own_gelu_is_within():
    gate, up = 3 * draw(ROWS, 4096).float(), draw(ROWS, 4096, seed=1).float()
    expected = gelu(gate.double()) * up.double()
    (rounding,) = found(expected, gate, up)
    error = row_errors(gelu(gate).double() * up.double(), expected) / UNIT
    assert bool((error <= rounding.allowance + 1).all())


def test_nothing_else_has_such_room():
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    assert found(relu(gate) * up, gate, up) == []
    assert found(gelu(gate, approximate="tanh") * up, gate, up) == []
    assert found(silu(gate) * up * 1.001, gate, up) == []
    assert found(silu(gate) * up, gate, up, dtype=torch.bfloat16) == []
    assert found(silu(gate) * up, gate[:, :5], up[:, :5]) == []
    assert found(silu(gate) * up, gate, up, up) == []


def test_a_row_of_nothing_has_no_room():
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    up[2] = 0
    (rounding,) = found(silu(gate) * up, gate, up)
    assert rounding.allowance[2] == 0
    assert bool(rounding.allowance.isfinite().all())
