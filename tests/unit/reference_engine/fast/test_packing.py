"""Packed and widened weights: the same product, from one row to many, and nothing where nothing is gained."""

import pytest
import torch
from torch.nn.functional import linear

from reference_engine.fast import packing
from reference_engine.fast.packing import MIN_ELEMENTS, can_widen, pack, packed_linear, widen, widened_linear
from reference_engine.fast.products import Widened
from reference_engine.layers import Linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-3}


def weight_of(dtype, num_inputs=768):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(MIN_ELEMENTS // num_inputs + 1, num_inputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 2, 17, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_that_of_the_plain_weight(dtype, num_rows, has_bias):
    weight = weight_of(dtype)
    packed = pack(weight)
    if not packed.is_mkldnn:
        pytest.skip(f"this CPU has no packed product in {dtype}")
    x = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.full((len(weight),), 3.0, dtype=dtype) if has_bias else None
    product = packed_linear(x, packed, bias)
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (product.dtype, product.shape) == (dtype, expected.shape)
    assert (product - expected).norm() / expected.norm() < TOLERANCE[dtype]


def test_a_packed_weight_looks_like_the_plain_one():
    weight = weight_of(torch.float32)
    packed = pack(weight)
    assert packed.is_mkldnn
    assert (packed.shape, packed.dtype, packed.numel()) == (weight.shape, weight.dtype, weight.numel())


@pytest.mark.parametrize("weight", [torch.zeros(8, 8), torch.empty(4096, 4096, device="meta")])
def test_small_weights_and_other_devices_stay_plain(weight):
    assert pack(weight) is weight


def test_dtypes_that_onednn_does_not_multiply_stay_plain():
    weight = torch.zeros(1024, 1024, dtype=torch.float64)
    assert pack(weight) is weight


def test_without_onednn_all_weights_stay_plain(monkeypatch):
    weight = weight_of(torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack(weight) is weight


@pytest.fixture
def has_no_16_bits(monkeypatch):
    """A CPU whose oneDNN multiplies float32 alone."""
    monkeypatch.setattr(packing, "_is_served", lambda dtype: dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_widened_product_is_rounded_once(has_no_16_bits, dtype, num_rows, has_bias):
    weight = weight_of(dtype)
    widened = widen(weight)
    assert (widened.dtype, widened.shape) == (torch.float32, weight.shape)
    x = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.full((len(weight),), 3.0, dtype=dtype) if has_bias else None
    product = widened_linear(x, widened, bias)
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (product.dtype, product.shape) == (dtype, expected.shape)
    # The nearest number of the dtype, but for the few that float32's own error carries over a boundary.
    assert (product != expected.to(dtype)).double().mean() < 1e-2


def test_one_row_is_read_from_the_narrow_weight_and_several_from_the_widened(has_no_16_bits):
    weight = weight_of(torch.bfloat16)
    layer = Linear(weight, None, Widened(widen(torch.zeros_like(weight))))
    x = torch.ones(2, weight.shape[1], dtype=torch.bfloat16)
    assert layer(x[:1]).any()
    assert not layer(x).any()


def test_weights_with_instructions_of_their_own_or_of_little_size_are_not_widened(has_no_16_bits, monkeypatch):
    assert widen(weight_of(torch.float32)) is None
    assert widen(torch.zeros(8, 8, dtype=torch.bfloat16)) is None
    assert widen(torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)) is None
    monkeypatch.setattr(packing, "_is_served", lambda dtype: True)
    assert widen(weight_of(torch.bfloat16)) is None


def test_second_copies_take_at_most_half_of_the_memory(has_no_16_bits, monkeypatch):
    weight = weight_of(torch.bfloat16)
    small = torch.zeros(8, 8, dtype=torch.bfloat16)  # not copied, so not counted
    monkeypatch.setattr(packing, "available_bytes", lambda: 2 * 4 * weight.numel())
    assert can_widen([weight, small])
    assert not can_widen([weight, small], num_engines=2)
    monkeypatch.setattr(packing, "available_bytes", lambda: 2 * 4 * weight.numel() - 1)
    assert not can_widen([weight])
