"""The fused kernels against the torch operations that they stand for: the same roundings, so almost the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from reference_engine.layers import RMSNorm
from reference_engine.rotary import apply_rotary

from .launching import IGNORE_NUMPY

pytestmark = IGNORE_NUMPY
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
MOST_ROUNDINGS = 4
"""Between two ways to add up a row of squares, in roundings of the result."""


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Nearly all elements agree bit for bit in 16 bits, and all within a few roundings of the largest."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    limit = MOST_ROUNDINGS * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * float(expected.abs().max()))
    if expected.dtype != torch.float32:
        assert (actual == expected).double().mean() > 0.99


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 48, 64, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_add_norm(device: torch.device, dtype: torch.dtype, width: int, scale: float) -> None:
    from reference_engine.fast.kernels.add_norm import add_norm, rms_norm

    x, delta, weight = (
        scale * random(device, dtype, 3, width),
        random(device, dtype, 3, width) * scale,
        random(device, dtype, width),
    )
    total, normed = add_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    assert_same(normed, RMSNorm(weight, EPS)(x + delta))
    assert_same(rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_and_one_with_a_nan(device: torch.device, dtype: torch.dtype) -> None:
    from reference_engine.fast.kernels.add_norm import rms_norm

    x = torch.zeros(2, 48, dtype=dtype, device=device)
    x[1, 7] = torch.nan
    normed = rms_norm(x, torch.ones(48, dtype=dtype, device=device), EPS)
    assert not normed[0].any()
    assert normed[1].isnan().all()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 12), (1, 1, 64), (16, 8, 128), (7, 7, 80)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rotate(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool
) -> None:
    from reference_engine.fast.kernels.norm_rotate import norm_rotate

    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = random(device, dtype, 3, sum(sizes))
    angles = random(device, torch.float32, 3, 1, head_dim // 2).repeat(1, 1, 2) * 10
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, _ = (part.view(3, -1, head_dim) for part in qkv.split(sizes, dim=-1))
    weights = (random(device, dtype, head_dim), 1 + random(device, dtype, head_dim)) if has_norm else (None, None)
    if has_norm:
        q, k = RMSNorm(weights[0], EPS)(q), RMSNorm(weights[1], EPS)(k)
    rotated, normed = norm_rotate(qkv, *rotation, *weights, EPS, num_heads, num_kv_heads, keeps_normed=has_norm)
    assert_same(rotated, torch.cat([apply_rotary(q, *rotation), apply_rotary(k, *rotation)], dim=1))
    if has_norm:
        assert_same(normed, torch.cat([q, k], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 80, 1024, 1500])
def test_silu_mul(device: torch.device, dtype: torch.dtype, width: int) -> None:
    from reference_engine.fast.kernels.silu_mul import silu_mul

    gate_up = 4 * random(device, dtype, 3, 2 * width)
    gate_up[0, 0], gate_up[1, 0] = -200, 200
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same(silu_mul(gate_up), silu(gate) * up)
