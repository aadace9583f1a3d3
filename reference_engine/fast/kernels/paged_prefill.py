"""Attention of chunks of several rows, K and V read through block tables.

The rows of all requests are packed, and cut into tiles that never span two requests; one program takes one tile of one
query head (FlashAttention-2, Dao 2023, arXiv:2307.08691, section 3.2: parallel over rows). What a tile computes depends
on its own request alone, so a chunk's results are bit for bit the same in every batch; and key tiles begin at multiples
of their size, so that the same keys are summed together whatever the chunk. Measured:
reports/h200/engine.md.

Shapes: T packed rows, M tiles, Q rows of a tile, C keys of a tile, R requests, B blocks, S slots in a block,
N query heads, K KV heads, H head dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.attend_tile import LOG2_E, attend_tile, normalise
from reference_engine.fast.kernels.interpreter import round_to
from reference_engine.fast.kernels.tiling import Tiling

__all__ = ["cut_into_tiles", "paged_prefill"]


def cut_into_tiles(
    query_lens: Sequence[int], context_lens: Sequence[int], tile_rows: int, *, first_request: int = 0
) -> list[tuple[int, int, int, int]]:
    """Return (request, packed row, rows, position of the first row) of each tile, from request `first_request` on."""
    tiles: list[tuple[int, int, int, int]] = []
    row = sum(query_lens[:first_request])
    for request in range(first_request, len(query_lens)):
        query_len = query_lens[request]
        position = context_lens[request] - query_len
        tiles += [
            (request, row + start, min(tile_rows, query_len - start), position + start)
            for start in range(0, query_len, tile_rows)
        ]
        row += query_len
    return tiles


def paged_prefill(
    q_TNH: torch.Tensor,
    k_cache_BSKH: torch.Tensor,
    v_cache_BSKH: torch.Tensor,
    block_tables_RB: torch.Tensor,
    tiles_M4: torch.Tensor,
    out_TNH: torch.Tensor,
    *,
    window: int | None,
    tiling: Tiling,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write softmax(q k / sqrt(H)) v to the rows of `out_TNH` that the tiles cover.

    The row at position p of its request sees positions p - window + 1 to p (without a window: 0 to p), whose K and V
    are in the cache. `tiles_M4`, int32, is what `cut_into_tiles` returned for `tiling.rows`. Scores, softmax and sums
    are float32.
    """
    num_heads, head_dim = q_TNH.shape[1:]
    block_size, num_kv_heads = k_cache_BSKH.shape[1:3]
    assert q_TNH.stride()[1:] == out_TNH.stride()[1:] == (head_dim, 1), "the heads of a row lie side by side"
    assert all(cache.is_contiguous() for cache in (k_cache_BSKH, v_cache_BSKH)), "a layer's cache is one piece"
    assert block_tables_RB.stride(1) == 1, "a block table is contiguous"
    _prefill_kernel[len(tiles_M4), num_heads](
        q_TNH, k_cache_BSKH, v_cache_BSKH, out_TNH, block_tables_RB, tiles_M4,
        q_TNH.stride(0), out_TNH.stride(0), block_tables_RB.stride(0), head_dim**-0.5 * LOG2_E,
        k_scale, v_scale,
        GROUP=num_heads // num_kv_heads, SLOT_WIDTH=num_kv_heads * head_dim, BLOCK_SIZE=block_size, WINDOW=window,
        HEAD_DIM=head_dim, PADDED_DIM=tiling.padded_head_dim, TILE_ROWS=tiling.rows, TILE_KEYS=tiling.keys,
        num_warps=tiling.num_warps, num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tables_ptr", "table_stride"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    tiles_ptr,
    q_stride,
    out_stride,
    table_stride,
    scale,
    k_scale,
    v_scale,
    GROUP: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    head = tl.program_id(1)
    request, row = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    num_rows, position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)

    rows_Q, dims_H = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    is_row_QH = (rows_Q < num_rows)[:, None] & (dims_H < HEAD_DIM)[None, :]
    packed_Q = (row + rows_Q).to(tl.int64)
    columns_H = head * HEAD_DIM + dims_H
    q_QH = tl.load(q_ptr + packed_Q[:, None] * q_stride + columns_H[None, :], mask=is_row_QH, other=0.0)

    positions_Q = position + rows_Q
    stop = position + num_rows
    first = 0
    if WINDOW is not None:
        first = tl.maximum(position - WINDOW + 1, 0)
    head_offset = (head // GROUP) * HEAD_DIM
    largest_Q = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    sum_Q = tl.full([TILE_ROWS], 0.0, tl.float32)
    product_QH = tl.full([TILE_ROWS, PADDED_DIM], 0.0, tl.float32)
    for start in range(first // TILE_KEYS * TILE_KEYS, stop, TILE_KEYS):
        keys_C = start + tl.arange(0, TILE_KEYS)
        is_visible_QC = keys_C[None, :] <= positions_Q[:, None]
        if WINDOW is not None:
            is_visible_QC = is_visible_QC & (keys_C[None, :] > positions_Q[:, None] - WINDOW)
        largest_Q, sum_Q, product_QH = attend_tile(
            q_QH, k_ptr + head_offset, v_ptr + head_offset, tables_ptr + request.to(tl.int64) * table_stride,
            keys_C, (keys_C >= first) & (keys_C < stop), is_visible_QC, scale, largest_Q, sum_Q, product_QH,
            k_scale, v_scale, SLOT_WIDTH, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
    context_QH, _ = normalise(largest_Q, sum_Q, product_QH)
    context_QH = round_to(context_QH, out_ptr.dtype.element_ty)
    tl.store(out_ptr + packed_Q[:, None] * out_stride + columns_H[None, :], context_QH, mask=is_row_QH)
