"""Products with a weight under their conventions, by hand and against loops."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.metrics import largest_rounding
from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions.entry import SuspectRows
from harness.judge.compare.conventions.linear import (
    CONVENTIONS,
    MODEL,
    PARTIAL_SUMS,
    ROUNDED_INPUTS,
    SUMS_IN_DTYPE,
    adapter_update,
    product,
    rounded_inputs,
    weight_and_bias,
)

from ..judgements import draw

ROWS, IN, OUT = 3, 8, 5
ROUNDED, SHARED, AFTER = (convention.alternatives for convention in CONVENTIONS[:3])


def subject_of(weight, x, *, bias=None, dtype=torch.bfloat16, name="o_proj", inputs=None, module=None, **declared):
    if module is None:
        module = nn.Module()
        module.weight, module.bias = weight, bias
    operation = Operation(tap=f"layer.{name}", kind=Kind.LINEAR, inputs=("x",), source=f"layer.{name}")
    unknown = torch.full((len(x), OUT), torch.nan)
    return SuspectRows(
        hf=SimpleNamespace(module=lambda _path: module), operation=operation, dtype=dtype, actual=unknown,
        expected=unknown, rows=torch.arange(len(x)), positions=torch.arange(len(x)),
        inputs=[x] if inputs is None else inputs, declared=Numerics(**declared),
    )  # fmt: skip


def test_the_weight_of_either_orientation():
    weight, bias, x = draw(OUT, IN), draw(OUT), draw(ROWS, IN)
    for kept in (weight, weight.T):
        weights = weight_and_bias(subject_of(kept.float(), x.unflatten(1, (2, -1)), bias=bias.float()))
        assert torch.equal(weights[0], weight.float().double())
        assert torch.equal(weights[1], bias.float().double())
        assert {item.dtype for item in weights} == {torch.float64}
    square = draw(IN, IN)
    assert torch.equal(weight_and_bias(subject_of(square, x))[0], square), "which may be either is [out, in]"
    assert weight_and_bias(subject_of(weight, x))[1] is None


def test_products_with_and_without_a_bias():
    weight, bias, x = draw(OUT, IN), draw(OUT), draw(ROWS, IN).float()
    by_hand = [[sum(float(a) * float(b) for a, b in zip(row, out, strict=True)) for out in weight] for row in x]
    plain = torch.tensor(by_hand, dtype=torch.float64)
    torch.testing.assert_close(product(x, weight, None), plain)
    torch.testing.assert_close(product(x, weight, bias), plain + bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_may_be_added_to_the_rounded_product(dtype):
    weight, x = draw(OUT, IN).to(dtype), draw(ROWS, IN).to(dtype)
    bias = (-(x.double() @ weight.double().T)[0]).to(dtype)  # what cancels shows how it was rounded
    (alternative,) = AFTER(subject_of(weight, x, bias=bias, dtype=dtype))
    by_hand = (x.double() @ weight.double().T).to(dtype).double() + bias.double()
    assert (alternative.name, alternative.model) == ("the bias added to the rounded product", MODEL)
    assert torch.equal(alternative.expected(), by_hand)
    assert (by_hand - product(x, weight.double(), bias.double())).norm() > 0
    assert not [*AFTER(subject_of(weight, x, dtype=dtype))]
    assert not [*AFTER(subject_of(weight.float(), x.float(), bias=bias.float(), dtype=torch.float32))]


def test_what_an_adapter_adds():
    weight, x, a, b = draw(OUT, IN), draw(ROWS, IN), draw(2, IN, seed=1), draw(OUT, 2, seed=2)
    attributes = {"weight": weight, "lora_a": a, "lora_b": b, "scaling": 3}

    def update(**changed):
        inputs = changed.pop("inputs", None)
        return adapter_update(subject_of(None, x, inputs=inputs, module=SimpleNamespace(**attributes | changed)))

    torch.testing.assert_close(update(), 3 * (b @ (a @ x.T)).T)
    torch.testing.assert_close(update(inputs=[x.unflatten(1, (2, -1))]), 3 * (b @ (a @ x.T)).T)
    assert update(lora_a=None) is None
    assert update(lora_b=None) is None
    assert update(inputs=[x, x]) is None
    assert update(inputs=[]) is None


# Ranks.


def parts_of(x, weight, bias, count, dtype):
    """What each rank gives, [count, rows, out]."""
    width = IN // count
    parts = []
    for rank in range(count):
        share = slice(rank * width, (rank + 1) * width)
        part = x[:, share] @ weight[:, share].T + (bias if rank == 0 else 0)
        parts.append(part.to(dtype).double())
    return torch.stack(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_sums_of_ranks_in_either_precision(count, dtype):
    weight, bias, x = draw(OUT, IN), draw(OUT), draw(ROWS, IN)
    weight[:, IN // 2 :] = -weight[:, : IN // 2] + 0.1 * weight[:, IN // 2 :]  # halves nearly cancel
    x[0, IN // 2 :] = x[0, : IN // 2]
    x[2] = 0
    alternatives = list(SHARED(subject_of(weight, x, bias=bias * (count == 4), dtype=dtype, num_ranks=count)))
    parts = parts_of(x, weight, bias * (count == 4), count, dtype)
    name = str(dtype).removeprefix("torch.")
    names = [PARTIAL_SUMS.format(count), SUMS_IN_DTYPE.format(name, count)]
    assert [item.name for item in alternatives] == names[: 1 if count == 2 else 2]
    for item in alternatives:
        assert item.model == MODEL
        torch.testing.assert_close(item.expected(), parts.sum(dim=0), rtol=1e-12, atol=1e-15)
    assert alternatives[0].allowance is None
    for row, allowance in enumerate(alternatives[1].allowance.tolist() if count > 2 else ()):
        total = float(parts[:, row].sum(dim=0).norm())
        between = math.sqrt(sum(float(part.norm()) ** 2 for part in parts[:, row]))
        expected = math.sqrt(count - 2) * largest_rounding(dtype) * max(1.0, between / total) if total else 0.0
        assert allowance == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, [PARTIAL_SUMS.format(count) for count in (2, 4, 8)]),
        ({"name": "q_proj"}, []),
        ({"name": "down_proj", "num_ranks": 2}, [PARTIAL_SUMS.format(2)]),
        ({"name": "c_proj", "num_ranks": 2}, [PARTIAL_SUMS.format(2)]),
        ({"dtype": torch.float32}, []),
        ({"num_ranks": 1}, []),
        ({"num_ranks": 3}, []),
        ({"inputs": [draw(ROWS, IN), draw(ROWS, IN)]}, []),
    ],
)
def test_where_products_are_shared(changed, names):
    assert [item.name for item in SHARED(subject_of(draw(OUT, IN), draw(ROWS, IN), **changed))] == names


def test_inputs_that_are_no_multiple_are_not_shared():
    x = draw(ROWS, 12)
    assert [item.name for item in SHARED(subject_of(draw(OUT, 12), x))] == [PARTIAL_SUMS.format(n) for n in (2, 4)]


def test_three_ranks_round_one_sum_in_between():
    alternatives = list(SHARED(subject_of(draw(OUT, 9), draw(ROWS, 9), num_ranks=3)))
    assert [item.name for item in alternatives] == [PARTIAL_SUMS.format(3), SUMS_IN_DTYPE.format("bfloat16", 3)]


def test_parts_that_cancel_to_nothing_have_no_room():
    weight, x = draw(OUT, IN), draw(ROWS, IN)
    weight[:, IN // 2 :] = -weight[:, : IN // 2]
    x[1, IN // 2 :] = x[1, : IN // 2]
    (_, in_dtype) = SHARED(subject_of(weight, x, num_ranks=4))
    assert in_dtype.expected()[1].tolist() == [0.0] * OUT
    assert [bool(allowance) for allowance in in_dtype.allowance] == [True, False, True]


# Inputs rounded to the dtype of the weight.


@pytest.mark.parametrize(
    ("changed", "dtypes"),
    [
        ({}, ["bfloat16", "float16"]),
        ({"weights": ("F32",)}, []),
        ({"weights": ("F16", "Q8_0")}, ["float16"]),
        ({"weights": ("F16", "BF16")}, ["float16", "bfloat16"]),
        ({"dtype": torch.bfloat16}, []),
        ({"inputs": [draw(ROWS, IN), draw(ROWS, IN)]}, []),
    ],
)
def test_which_dtypes_inputs_are_rounded_to(changed, dtypes):
    """The weight is on the grids of both."""
    weight, x, bias = draw(OUT, IN).bfloat16().half().double().bfloat16().float(), draw(ROWS, IN), draw(OUT)
    subject = subject_of(weight, x.unflatten(1, (2, -1)), bias=bias, **{"dtype": torch.float32} | changed)
    alternatives = list(ROUNDED(subject))
    assert [item.name for item in alternatives] == [ROUNDED_INPUTS.format(name) for name in dtypes]
    for item, name in zip(alternatives, dtypes, strict=True):
        rounded = x.float().to(getattr(torch, name)).double()
        torch.testing.assert_close(item.expected(), rounded @ weight.double().T + bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "names"), [(torch.float16, ["float16"]), (torch.float32, [])])
def test_inputs_are_rounded_only_to_a_dtype_that_holds_the_weight(dtype, names):
    weight = draw(OUT, IN).to(dtype)
    alternatives = ROUNDED(subject_of(weight.float(), draw(ROWS, IN), dtype=torch.float32))
    assert [item.name for item in alternatives] == [ROUNDED_INPUTS.format(name) for name in names]


def test_inputs_as_products_with_16_bits_see_them():
    x = draw(ROWS, IN)
    actual = list(rounded_inputs(x, ["Q8_0", "F16", "BF16"]))
    assert torch.equal(actual[0], x.float().half().double())
    assert torch.equal(actual[1], x.float().bfloat16().double())
    assert len(actual) == 2
