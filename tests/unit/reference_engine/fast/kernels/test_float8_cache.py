"""The kernels over a cache in float8 with scales: what they store, and what they read of it."""

from __future__ import annotations

import pytest
import torch

from .launching import IGNORE_NUMPY
from .workload import TOLERANCE, Workload, attention, relative_l2

pytestmark = IGNORE_NUMPY
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = (0.013, 0.7)


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    top = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-top, top).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", FLOAT8, ids=str)
def test_quotients_are_cut_off_and_rounded_as_torch_does(
    device: torch.device, dtype: torch.dtype, kept: torch.dtype
) -> None:
    from reference_engine.fast.kernels.store_kv import store_kv

    torch.manual_seed(0)
    k, v = (factor * torch.randn(40, 2, 16).to(device, dtype) for factor in (3, 30))
    k[0, 0, 0], v[1, 1, 1], v[2, 0, 0] = torch.nan, 1e5 if dtype != torch.float16 else 6e4, 0.0
    caches = [torch.zeros(12, 4, 2, 16, device=device).to(kept) for _ in "kv"]
    slots = torch.arange(3, 43, device=device)
    store_kv(k, v, slots, *caches, k_scale=SCALES[0], v_scale=SCALES[1])
    for rows, cache, scale in zip((k, v), caches, SCALES, strict=True):
        actual, expected = cache.float().flatten(0, 1)[slots], stored(rows, scale, kept).float()
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
        assert not cache.float().flatten(0, 1)[:3].any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kept", FLOAT8, ids=str)
def test_attention_reads_numbers_times_their_scale(device: torch.device, dtype: torch.dtype, kept: torch.dtype) -> None:
    from reference_engine.fast.kernels.paged_decode import paged_decode
    from reference_engine.fast.kernels.paged_prefill import cut_into_tiles, paged_prefill

    lens = (5, 16, 40)
    workload = Workload(device, context_lens=lens, head_dim=32, dtype=dtype)
    caches = [stored(x, scale, kept) for x, scale in zip(workload.caches, SCALES, strict=True)]
    read = [
        [(stored(x, scale, kept).float() * scale).to(dtype) for x in rows]
        for rows, scale in zip((workload.k, workload.v), SCALES, strict=True)
    ]
    q, tiling = workload.queries(lens), workload.tiling()
    expected = torch.cat([attention(*qkv, None) for qkv in zip(q.split(lens), *read, strict=True)])
    tiles = torch.tensor(cut_into_tiles(lens, lens, tiling.rows), dtype=torch.int32, device=device)
    scales = {"k_scale": SCALES[0], "v_scale": SCALES[1]}
    out = workload.output(q)
    paged_prefill(q, *caches, workload.tables, tiles, out, window=None, tiling=tiling, **scales)
    assert relative_l2(out, expected) < TOLERANCE[dtype]
    last = torch.tensor(lens, device=device).cumsum(0) - 1
    context_lens = torch.tensor(lens, device=device)
    for min_split_keys in (16, 256):
        out = workload.output(q[last])
        paged_decode(
            q[last].contiguous(), *caches, workload.tables, context_lens, out, window=None,
            tiling=workload.tiling(keys=16), min_split_keys=min_split_keys, **scales,
        )  # fmt: skip
        assert relative_l2(out, expected[last]) < TOLERANCE[dtype]
