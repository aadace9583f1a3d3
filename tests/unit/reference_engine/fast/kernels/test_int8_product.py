"""The product of integers with scales: the sums exact, and scaled once."""

from __future__ import annotations

import pytest
import torch

from reference_engine.families.quantised import in_int8, quantised_linear

from .launching import IGNORE_NUMPY

pytestmark = IGNORE_NUMPY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 5, 32), (3, 70, 200), (20, 64, 128)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_what_torch_s_integers_give(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    from reference_engine.fast.kernels.int8_product import int8_product

    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(device, dtype)
    x[1:2] = 0
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator).to(device, torch.int8)
    scale = (0.01 + torch.rand(num_outputs, 1, generator=generator)).to(device)
    bias = torch.randn(num_outputs, generator=generator).to(device, dtype) if has_bias else None
    integers, row_scale = in_int8(x)
    assert integers.abs().max() == 127
    actual = int8_product(integers, row_scale, weight, scale, bias, dtype)
    assert (actual.shape, actual.dtype) == ((num_rows, num_outputs), dtype)
    sums = integers.double() @ weight.double().T
    exact = sums * row_scale.double() * scale[:, 0].double() + (0.0 if bias is None else bias.double())
    limit = {"rtol": torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(actual.double(), exact, **limit)
    torch.testing.assert_close(quantised_linear(weight, bias, scale, None)(x).double(), exact, **limit)


def test_sums_do_not_overflow(device: torch.device) -> None:
    from reference_engine.fast.kernels.int8_product import int8_product

    x = torch.full((1, 4096), 127, dtype=torch.int8, device=device)
    one = torch.ones(1, 1, device=device)
    assert int8_product(x, one, x, one, None, torch.float32).item() == 4096 * 127 * 127
