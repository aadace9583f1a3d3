from __future__ import annotations

import pytest
import torch

from .launching import IGNORE_NUMPY

pytestmark = IGNORE_NUMPY
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (2, 12), (3, 32)])
def test_rows_land_in_their_slots_and_nowhere_else(
    device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    from reference_engine.fast.kernels.store_kv import store_kv

    torch.manual_seed(0)
    caches = [torch.randn(5, 4, num_kv_heads, head_dim).to(device, dtype) for _ in "kv"]
    caches[0][2] = torch.nan
    expected = [cache.clone().flatten(0, 1) for cache in caches]
    # As a fused projection leaves them: views of wider rows.
    qkv = torch.randn(4, 5 * num_kv_heads, head_dim).to(device, dtype)
    qkv[3, :, 0] = torch.nan
    qkv[3, :, 1] = -0.0
    k, v = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads : 3 * num_kv_heads]
    slots = torch.tensor([7, -1, 19, 0], device=device)
    store_kv(k, v, slots, *caches)
    for rows, cache, untouched in zip((k, v), caches, expected, strict=True):
        for row in (0, 2, 3):
            untouched[slots[row]] = rows[row]
        assert torch.equal(cache.flatten(0, 1).view(BITS[dtype]), untouched.view(BITS[dtype]))


def test_padding_alone_changes_nothing(device: torch.device) -> None:
    from reference_engine.fast.kernels.store_kv import store_kv

    caches = [torch.zeros(2, 4, 1, 16, device=device) for _ in "kv"]
    rows = torch.ones(3, 1, 16, device=device)
    store_kv(rows, rows, torch.full((3,), -1, device=device), *caches)
    assert not any(cache.any() for cache in caches)
