"""Products of the truth in blocks of output features are what HF's own linear modules compute."""

import pytest
import torch
from torch.nn import functional

from harness.oracle import precision
from harness.oracle.precision import PreservePrecision


@pytest.fixture(autouse=True)
def _four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_out", [1024, 1022], ids=["blocks", "no whole blocks"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 512), (2, 3, 512), (512,)], ids=str)
def test_a_product_in_blocks_is_the_product(num_out, has_bias, shape):
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, (num_out, 512), num_out)
    )
    bias = bias if has_bias else None
    torch.testing.assert_close(
        precision.linear(x, weight, bias), functional.linear(x, weight, bias), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("dtype", "is_split"), [(torch.float64, True), (torch.float32, False)])
def test_large_products_in_float64_are_split(monkeypatch, dtype, is_split):
    split = []
    monkeypatch.setattr(torch, "bmm", lambda x, y, bmm=torch.bmm: split.append(len(x)) or bmm(x, y))
    with PreservePrecision(dtype):
        functional.linear(torch.ones(3, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype))
        functional.linear(torch.ones(3, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype))
    assert split == [4] * is_split
