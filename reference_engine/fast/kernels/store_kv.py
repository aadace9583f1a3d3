"""Write the step's K and V to their slots: what `KVCache.store` does with two index copies, in one launch.

Shapes: T tokens, B blocks, S slots in a block, K KV heads, H head dim, W = K * H.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import round_to

__all__ = ["store_kv"]


def store_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_BSKH: torch.Tensor,
    v_cache_BSKH: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Copy row t of K and V to slot `slots_T[t]`; a row whose slot is negative (padding) is written nowhere.

    The caches are those of one layer, contiguous. Rows of K and V may be strided (views of a fused projection). What a
    cache in float8 gets is the quotient by the scale, cut off at its largest number.
    """
    dtype = k_cache_BSKH.dtype
    num_rows, num_kv_heads, head_dim = k_TKH.shape
    width = num_kv_heads * head_dim
    for rows, cache in ((k_TKH, k_cache_BSKH), (v_TKH, v_cache_BSKH)):
        assert rows.shape == k_TKH.shape, "K and V go together"
        assert rows.stride()[1:] == (head_dim, 1), "the heads of a row lie side by side"
        assert cache.shape[2:] == rows.shape[1:], "the cache is [B, S, K, H]"
        assert cache.is_contiguous(), "a layer's cache is one piece"
    _store_kernel[num_rows,](
        k_TKH, v_TKH, slots_T, k_cache_BSKH, v_cache_BSKH, k_TKH.stride(0), v_TKH.stride(0), k_scale, v_scale,
        TOP=torch.finfo(dtype).max if dtype.itemsize == 1 else None,
        WIDTH=width, PADDED_WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip


@triton.jit
def _in_float8(x, scale, TOP: tl.constexpr, dtype: tl.constexpr):
    quotient = tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))
    return round_to(tl.minimum(tl.maximum(quotient, -TOP, tl.PropagateNan.ALL), TOP, tl.PropagateNan.ALL), dtype)


@triton.jit(do_not_specialize=["slots_ptr"])
def _store_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_stride,
    v_stride,
    k_scale,
    v_scale,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    # 64 bit: a cache holds more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    columns_W = tl.arange(0, PADDED_WIDTH)
    is_written_W = (columns_W < WIDTH) & (slot >= 0)
    k_W = tl.load(k_ptr + row * k_stride + columns_W, mask=is_written_W)
    v_W = tl.load(v_ptr + row * v_stride + columns_W, mask=is_written_W)
    if TOP is not None:
        k_W = _in_float8(k_W, k_scale, TOP, k_cache_ptr.dtype.element_ty)
        v_W = _in_float8(v_W, v_scale, TOP, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + slot * WIDTH + columns_W, k_W, mask=is_written_W)
    tl.store(v_cache_ptr + slot * WIDTH + columns_W, v_W, mask=is_written_W)
