"""Packed weights: the same product, from one row to many, and nothing where nothing is gained."""

import pytest
import torch
from torch.nn.functional import linear

from reference_engine.packing import MIN_ELEMENTS, pack, packed_linear

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
