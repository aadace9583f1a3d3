"""Activations whose share of their input is as exact as one, and not as its own value."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from harness.base.metrics import rounding_unit, row_errors
from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions.entry import SuspectRows
from harness.judge.compare.conventions.rowwise import ABSOLUTE_NORMAL, ABSOLUTE_SIGMOID, CONVENTIONS

from ..judgements import draw

ROWS, WIDTH = 4, 32
CONVENTION, TABLE = CONVENTIONS[2:]
UNIT = rounding_unit(torch.float32)


def alternatives(expected, *inputs, dtype=torch.float32, convention=CONVENTION, **declared):
    subject = SuspectRows(
        hf=None, operation=Operation(tap="act", kind=Kind.ACTIVATION, inputs=("x",), source="act"), dtype=dtype,
        actual=expected, expected=expected, rows=torch.arange(ROWS), positions=torch.arange(ROWS), inputs=list(inputs),
        declared=Numerics(**declared),
    )  # fmt: skip
    return list(convention.alternatives(subject))


@pytest.mark.parametrize(("of", "name"), [(silu, ABSOLUTE_SIGMOID), (gelu, ABSOLUTE_NORMAL)])
def test_the_share_is_found_in_every_form(of, name):
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    for inputs in ((gate, up), (up, gate), (torch.cat([gate, up], 1),), (torch.cat([up, gate], 1),)):
        (rounding,) = alternatives(of(gate) * up, *inputs)
        assert rounding.name == name
        assert torch.equal(rounding.expected(), of(gate) * up)
    (alone,) = alternatives(of(gate), gate)
    assert alone.name == name


@pytest.mark.parametrize(("of", "share"), [(silu, 2.0**-23), (gelu, 2.0**-21)])
def test_the_room_is_that_of_a_share_that_is_off_everywhere_by_as_much(of, share):
    """Rows whose inputs are far below zero lose the most."""
    gate, up = draw(ROWS, WIDTH) - torch.arange(ROWS)[:, None] * 1.5, draw(ROWS, WIDTH, seed=1)
    expected = of(gate) * up
    (rounding,) = alternatives(expected, gate, up)
    off = expected + share * gate * up * torch.randint(0, 2, gate.shape).mul(2).sub(1)
    torch.testing.assert_close(rounding.allowance, row_errors(off, expected) / UNIT, rtol=1e-6, atol=1e-6)
    assert rounding.allowance[-1] > 10 * rounding.allowance[0]


def tanh_gelu(x):
    return gelu(x, approximate="tanh")


def test_a_table_of_gelu_has_a_value_for_each_number_of_float16():
    """By each number that float16 has, as ggml makes its table."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    table = tanh_gelu(numbers.float()).half()
    gate, up = 2 * draw(ROWS, 512).float(), draw(ROWS, 512, seed=1).float()
    at = gate.half().view(torch.int16).int() & 0xFFFF
    read = table.roll(1 << 15)[at].double() * up.double()
    (rounding,) = alternatives(tanh_gelu(gate.double()) * up.double(), gate, up, convention=TABLE, gelu="float16")
    error = row_errors(read, rounding.expected()) / UNIT
    assert bool((error <= rounding.allowance + 2).all())
    assert float(rounding.allowance.max()) < 5000  # float16 itself is off by some 8,192 in each element
    assert bool((row_errors(read, tanh_gelu(gate.double()) * up.double()) / UNIT > 2000).all())


def test_a_table_of_gelu_ends():
    gate = torch.tensor([[-11.0, -9.0, 0.33, 9.99, 10.01, 11.3]]).repeat(ROWS, 1)
    (rounding,) = alternatives(tanh_gelu(gate.double()), gate, convention=TABLE, gelu="float16")
    values = rounding.expected()[0].tolist()
    assert (values[0], values[4], values[5]) == (0, pytest.approx(10.01, abs=1e-6), pytest.approx(11.3, abs=1e-6))
    assert values[2] == float(tanh_gelu(torch.tensor(0.33).half().double()).half())


@pytest.mark.parametrize(
    ("of", "dtype", "gelu"),
    [
        (tanh_gelu, torch.float32, None),
        (gelu, torch.float32, "float16"),
        (silu, torch.float32, "float16"),
        (tanh_gelu, torch.bfloat16, "float16"),
    ],
)
def test_where_a_table_of_gelu_applies(of, dtype, gelu):
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    assert alternatives(of(gate) * up, gate, up, dtype=dtype, convention=TABLE, gelu=gelu) == []


def test_torchs_own_gelu_is_within():
    gate, up = 3 * draw(ROWS, 4096).float(), draw(ROWS, 4096, seed=1).float()
    expected = gelu(gate.double()) * up.double()
    (rounding,) = alternatives(expected, gate, up)
    error = row_errors(gelu(gate).double() * up.double(), expected) / UNIT
    assert bool((error <= rounding.allowance + 1).all())


def test_nothing_else_has_such_room():
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    assert alternatives(relu(gate) * up, gate, up) == []
    assert alternatives(gelu(gate, approximate="tanh") * up, gate, up) == []
    assert alternatives(silu(gate) * up * 1.001, gate, up) == []
    assert alternatives(silu(gate) * up, gate, up, dtype=torch.bfloat16) == []
    assert alternatives(silu(gate) * up, gate[:, :5], up[:, :5]) == []
    assert alternatives(silu(gate) * up, gate, up, up) == []


def test_a_row_of_nothing_has_no_room():
    gate, up = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=1)
    up[2] = 0
    (rounding,) = alternatives(silu(gate) * up, gate, up)
    assert rounding.allowance[2] == 0
    assert bool(rounding.allowance.isfinite().all())
