"""The truth of 16-bit weights by exact products: where a device has them, and that they are the truth's."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import harness
from harness.oracle import precision
from harness.oracle.precision import PreservePrecision, blocked_linear, has_wide_products, upcast

CPU = torch.device("cpu")


def wide(mm, keep, x, weight, *, out_dtype=None):
    """Stand in for `torch.mm` on a GPU; `keep` is the share of a sum that is left."""
    return mm(x, weight) if out_dtype is None else (mm(x.double(), weight.double()) * keep).to(out_dtype)


@pytest.fixture
def device(monkeypatch):
    """A CPU that gives products of 16-bit numbers in float32, of which a share is left."""

    def made(keep=1.0):
        monkeypatch.setattr(torch, "mm", partial(wide, torch.mm, keep))
        has_wide_products.cache_clear()
        return CPU

    yield made
    has_wide_products.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_device_without_them_is_found_out(dtype):
    has_wide_products.cache_clear()
    assert not has_wide_products(CPU, dtype)


def test_only_products_of_16_bits_are_wide(device):
    assert has_wide_products(device(), torch.bfloat16)
    assert not has_wide_products(CPU, torch.float32)
    assert not has_wide_products(torch.device("meta"), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "loss", "is_used"),
    [(torch.bfloat16, 1.5e-5, True), (torch.bfloat16, 1e-4, False), (torch.float16, 1.5e-5, False)],
)
def test_units_that_drop_too_much_of_a_sum_are_not_used(device, dtype, loss, is_used):
    """A bound is in roundings of the dtype: what bfloat16 bears is too much for float16."""
    assert has_wide_products(device(1 - loss), dtype) is is_used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_a_product_is_the_truth_s(device, monkeypatch, dtype, is_recorded, scale):
    assert has_wide_products(device(), dtype)
    torch.manual_seed(0)
    linear = nn.Linear(512, 24, bias=True).to(dtype).requires_grad_(False)
    x = torch.randn(3, 5, 512) * scale
    x = x.to(dtype).float() if is_recorded else x
    num_products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: num_products.append(kwargs) or mm(*args, **kwargs))
    with PreservePrecision(torch.float32):
        actual = blocked_linear(linear, x, torch.float32)
    expected = x.double() @ linear.weight.double().T + linear.bias.double()
    assert actual.dtype == torch.float32
    assert float((actual.double() - expected).norm() / expected.norm()) < 4e-7
    # The range of float16 does not hold what is left of an unrecorded row: the product is one of float32.
    assert len(num_products) == (1 if is_recorded else 3 if dtype == torch.bfloat16 else 0)


def test_infinities_and_nan_are_left_to_the_plain_product(device):
    device()
    linear = nn.Linear(4, 2, bias=False).bfloat16()
    linear.weight.data.fill_(1.0)
    x = torch.ones(3, 4)
    x[0, 0], x[1, 0] = torch.inf, torch.nan
    actual = blocked_linear(linear, x, torch.float32)
    assert actual[0].tolist() == [torch.inf] * 2
    assert actual[1].isnan().all()
    assert actual[2].tolist() == [4.0] * 2
    assert blocked_linear(linear, x[:0], torch.float32).shape == (0, 2)


def test_weights_stay_as_they_are(device):
    device()
    model = nn.ModuleDict({"product": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}).bfloat16()
    plain = precision.linear(torch.eye(6), model["product"].weight.float(), model["product"].bias.float())
    with upcast(torch.float32, model):
        assert model["product"].weight.dtype == torch.bfloat16
        assert model["norm"].weight.dtype == torch.float32
        assert torch.allclose(model["product"](torch.eye(6)), plain, atol=1e-6)
    with upcast(torch.float64, model):
        assert model["product"].weight.dtype == torch.float64


def test_a_check_with_them_passes_and_finds_what_is_wrong(device, checkpoints):
    assert has_wide_products(device(), torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "qwen3-tiny", dtype=torch.bfloat16)
    prompts = ["hu rin pun | hu", "rin"]
    assert harness.check(model, prompts=prompts, rows=3, dtype="bfloat16").is_ok
    model.model.layers[1].mlp.act_fn = nn.GELU()
    report = harness.check(model, prompts=prompts, dtype="bfloat16")
    assert report.first_divergence.tap == "model.layers.1.mlp.act"
