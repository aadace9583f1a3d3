"""What numbers become in other formats, against values computed by hand or by torch's own bits."""

import math

import pytest
import torch

from harness.judge.explain.core.formats import (
    cut_off,
    float8,
    int8,
    name_of,
    of_inputs,
    of_inputs_alone,
    of_weights,
    rounded,
)

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_names_are_torchs_own():
    assert [name_of(dtype) for dtype in (torch.bfloat16, torch.float8_e5m2)] == ["bfloat16", "float8_e5m2"]


def test_cutting_off_to_bfloat16_clears_the_low_bits_of_float32():
    x = X.float().double()
    bits = x.float().view(torch.int32) & -(1 << 16)
    assert torch.equal(cut_off(x, torch.bfloat16), bits.view(torch.float32).double())
    assert cut_off(torch.tensor([1.9999, -1.9999]).double(), torch.bfloat16).tolist() == [1.9921875, -1.9921875]


def test_cutting_off_keeps_what_the_dtype_has():
    for dtype in (torch.bfloat16, torch.float16):
        kept = rounded(X, dtype)
        assert torch.equal(cut_off(kept, dtype), kept)
        assert not torch.equal(cut_off(X, dtype), kept), "towards zero, and not to the nearest"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_subnormal_numbers_are_cut_off_to_their_own_step(dtype):
    """vLLM's cache in float8 on a CPU keeps 0.0131 as 6/512: below 1/64 the steps of e4m3fn grow no smaller."""
    every = torch.arange(1 << 8, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else None
    values = torch.arange(1 << 15, dtype=torch.int16).view(dtype) if every is None else every
    values = values[values.double().isfinite()].double().abs().unique()
    below = values[1:] - 0.01 * values.diff()
    assert torch.equal(cut_off(values, dtype), values)
    assert torch.equal(cut_off(below, dtype), values[:-1])


def test_int8_has_127_levels_on_either_side_of_its_largest_number():
    x = torch.tensor([[127.0, -3.4, 0.6], [0.254, -0.0041, 0.001]], dtype=torch.float64)
    assert int8(x, (1,)).tolist()[0] == [127.0, -3.0, 1.0]
    assert int8(x, (1,))[1].tolist() == pytest.approx([0.254, -0.004, 0.0])
    assert int8(x, None)[1].tolist() == [0.0, 0.0, 0.0], "one scale for all"


@pytest.mark.parametrize("change", [int8, lambda x, dims: float8(x, torch.float8_e4m3fn, dims)])
@pytest.mark.parametrize("dims", [(1,), None])
def test_zeros_stay_zeros(change, dims):
    assert change(torch.zeros(2, 3, dtype=torch.float64), dims).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_uses_its_whole_range(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([[3.0, 1.0, -0.01]], dtype=torch.float64)
    scaled = (values * largest / 3).float().to(dtype).double() * 3 / largest
    assert torch.allclose(float8(values, dtype, (1,)), scaled, rtol=1e-12)
    assert float8(values, dtype, (1,))[0, 0] == pytest.approx(3.0)
    assert torch.allclose(float8(values / 64, dtype, (1,)), scaled / 64, rtol=1e-12)


def changes(entries):
    return {entry[0]: entry[-1](X) for entry in entries}


INT4 = ("one scale", "a scale and a minimum", "a scale and a zero point")


def test_what_a_weight_may_be_kept_in_has_a_scale_where_its_name_says_so():
    changed = changes(of_weights(64))
    groups = X.unflatten(1, (2, 32))
    assert torch.equal(changed["in int8, with one scale for 32 inputs"], int8(groups, (2,)).flatten(1))
    assert torch.equal(changed["in int8, with one scale for each output"], int8(X, (1,)))
    assert torch.equal(changed["in int8, with one scale for all of it"], int8(X, None))
    assert torch.equal(changed["in float8_e4m3fn, without a scale"], X.to(torch.float8_e4m3fn).double())
    assert torch.equal(changed["in bfloat16"], X.bfloat16().double())
    ways = ("int8, with one scale", *(f"int4, with {what}" for what in INT4))
    assert [name for name in changed if "inputs" in name] == [
        f"in {way} for {size} inputs" for size in (16, 32) for way in ways
    ], "groups are smaller than the row"
    largest, (least, most) = groups.abs().amax(dim=2, keepdim=True), groups.aminmax(dim=2, keepdim=True)
    codes = {"one scale": (largest / 7, 0.0), "a scale and a minimum": ((most - least) / 15, least)}
    for what, (step, begin) in codes.items():
        meant = (begin + step * ((groups - begin) / step).round()).flatten(1)
        torch.testing.assert_close(changed[f"in int4, with {what} for 32 inputs"], meant)
    step = (most - least) / 15
    code = changed["in int4, with a scale and a zero point for 32 inputs"].unflatten(1, (2, 32)) / step
    torch.testing.assert_close(code, code.round())
    assert float((code.amax(dim=2) - code.amin(dim=2)).max()) <= 15 + 1e-9
    assert float((code - groups / step).abs().max()) < 1
    factor = torch.finfo(torch.float8_e4m3fn).max / X.abs().max()
    scaled = changed["in float8_e4m3fn, with one scale for all of it"]
    torch.testing.assert_close(changed["in float8_e4m3fn, and its one scale is left out"], factor * scaled)
    assert not [name for name, _ in of_weights(40) if "inputs" in name], "and divide it"


def test_a_scale_in_float16_is_rounded_itself():
    changed = changes(of_inputs_alone(64))
    plain, kept = (changed[f"int8, with one scale{how} for 16 inputs"] for how in ("", " in float16"))
    scale = X.unflatten(1, (4, 16)).abs().amax(dim=2, keepdim=True) / 127
    factor = (scale.float().half().double() / scale).expand(6, 4, 16).flatten(1)
    assert torch.allclose(kept, plain * factor, rtol=1e-12)
    assert not torch.equal(kept, plain)
    zeros = torch.zeros(2, 64, dtype=torch.float64)
    assert all(torch.equal(change(zeros), zeros) for _, change in of_inputs_alone(64))


def test_inputs_go_with_the_weights_of_their_own_format():
    assert {name: weights for name, weights, _ in of_inputs()}["int8, with one scale for each token"] == "in int8"
    for name, weights, change in of_inputs():
        assert name.startswith(weights.removeprefix("in ")), name
        assert math.isclose(float(change(X).abs().max()), float(X.abs().max()), rel_tol=0.07), name
