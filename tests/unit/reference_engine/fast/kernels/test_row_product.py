"""The product of one row against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from reference_engine.families.quantised import dequantised, quantised_linear

from .launching import IGNORE_NUMPY

pytestmark = IGNORE_NUMPY


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (5, 48), (16, 1024), (7, 2500)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_product(
    device: torch.device, dtype: torch.dtype, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    from reference_engine.fast.kernels.row_product import row_product

    x, weight = random(device, dtype, 1, num_inputs), random(device, dtype, num_outputs, num_inputs)
    bias = random(device, dtype, num_outputs) if has_bias else None
    actual = row_product(x, weight, bias)
    assert (actual.shape, actual.dtype) == ((1, num_outputs), dtype)
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    scale = x.double().norm() * weight.double().norm(dim=1) + (0.0 if bias is None else bias.double().abs())
    error = (actual.double() - expected).abs() / scale
    rounded = (expected.to(dtype).double() - expected).abs() / scale  # what the dtype itself cannot hold
    assert bool((error <= rounded + 2e-7).all())


def test_a_nan_of_one_output_stays_there(device: torch.device) -> None:
    from reference_engine.fast.kernels.row_product import row_product

    x, weight = random(device, torch.float32, 1, 40), random(device, torch.float32, 6, 40)
    weight[2, 39] = torch.nan
    assert row_product(x, weight, None).isnan().tolist() == [[False, False, True, False, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [None, 32, 48])
def test_a_weight_in_float8_is_dequantised_on_the_way(
    device: torch.device, dtype: torch.dtype, block: int | None
) -> None:
    from reference_engine.fast.kernels.row_product import row_product

    x, bias = random(device, dtype, 1, 200), random(device, dtype, 7)
    weight = random(device, torch.float32, 7, 200).to(torch.float8_e4m3fn)
    scale = 0.1 + random(device, torch.float32, 7, 1 if block is None else -(-200 // block)).abs()
    product = quantised_linear(weight, bias, scale, block)
    actual, expected = row_product(x, weight, bias, scale, 200 if block is None else block), product(x)
    assert (actual.shape, actual.dtype) == ((1, 7), dtype)
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    exact = x.double() @ dequantised(weight, scale, 200 if block is None else block, dtype).double().T + bias.double()
    torch.testing.assert_close(actual.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
