from __future__ import annotations

import pytest
import torch

from reference_engine.fast.kernels.tiling import MAX_HEAD_DIM, find_tiling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_that_is_served_has_tiles(dtype: torch.dtype) -> None:
    for head_dim in range(1, MAX_HEAD_DIM + 1):
        tiling = find_tiling(head_dim, dtype)
        assert head_dim <= tiling.padded_head_dim < max(17, 2 * head_dim)
        for side in (tiling.rows, tiling.keys, tiling.padded_head_dim):
            assert side >= 16
            assert side & (side - 1) == 0
        assert 256 % tiling.keys == 0, "decode's splits are whole tiles"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "expected"),
    [
        (64, torch.bfloat16, (128, 64, 64)),
        (128, torch.bfloat16, (128, 64, 128)),
        (256, torch.float16, (64, 32, 256)),
        (64, torch.float32, (64, 32, 64)),
        (80, torch.float32, (32, 16, 128)),
        (12, torch.float32, (128, 64, 16)),
    ],
)
def test_wide_heads_have_small_tiles(head_dim: int, dtype: torch.dtype, expected: tuple[int, int, int]) -> None:
    tiling = find_tiling(head_dim, dtype)
    assert (tiling.rows, tiling.keys, tiling.padded_head_dim) == expected
