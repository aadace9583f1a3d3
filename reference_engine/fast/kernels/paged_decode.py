"""Attention of one row a request, K and V read through block tables, long contexts split among programs.

Flash-Decoding (Dao, Haziza, Massa and Sizov 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html): one program takes
one split of the keys of one KV head, with all query heads of that KV head as the rows of its tile, so that K and V are
read once. A second kernel merges the splits of requests that have several.

A request's results do not depend on its batch mates, bit for bit: how its keys are split follows from its own number of
keys, and the merge always sums over `max_splits` places. Mates, or rather the width of the block tables, decide only
how many programs are started; those without keys end at once. Measured:
reports/h200/engine.md.

Shapes: R requests, G query heads of a KV head (padded), C keys of a tile, P splits, B blocks, S slots in a block,
N query heads, K KV heads, H head dim.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.attend_tile import LOG2_E, attend_tile, normalise
from reference_engine.fast.kernels.interpreter import round_to
from reference_engine.fast.kernels.tiling import Tiling, power_of_two

__all__ = ["MIN_SPLIT_KEYS", "max_splits", "paged_decode"]

# About one for each multiprocessor of the GPUs at hand (132).
NUM_PROGRAMS = 128
FEWEST_SPLITS, MOST_SPLITS = 16, 64
# Splits are at least this long: shorter ones would cost more to merge than they win. A multiple of every key tile.
MIN_SPLIT_KEYS = 256
# Block table, then K and V: with 5 stages two tiles of each are on their way while a third is computed with.
NUM_STAGES, NUM_WARPS = 5, 4


def max_splits(num_kv_heads: int) -> int:
    """Return the most splits of a request's keys, a power of two: of fewer KV heads it takes more to fill a GPU.

    8 KV heads in 16 splits are 128 programs. A program that merges holds all splits of a head in its registers, so 64
    are the most. Only 16 have been timed.
    """
    wanted = 1 << max(1, NUM_PROGRAMS // num_kv_heads).bit_length() - 1
    return min(max(wanted, FEWEST_SPLITS), MOST_SPLITS)


def paged_decode(
    q_RNH: torch.Tensor,
    k_cache_BSKH: torch.Tensor,
    v_cache_BSKH: torch.Tensor,
    block_tables_RB: torch.Tensor,
    context_lens_R: torch.Tensor,
    out_RNH: torch.Tensor,
    *,
    window: int | None,
    tiling: Tiling,
    min_split_keys: int = MIN_SPLIT_KEYS,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write softmax(q k / sqrt(H)) v over the latest `window` (None: all) of each request's keys to `out_RNH`.

    A request without keys (padding) gets zeros. Scores, softmax and sums are float32.
    """
    num_requests, num_heads, head_dim = q_RNH.shape
    block_size, num_kv_heads = k_cache_BSKH.shape[1:3]
    assert q_RNH.stride()[1:] == out_RNH.stride()[1:] == (head_dim, 1), "the heads of a row lie side by side"
    assert all(cache.is_contiguous() for cache in (k_cache_BSKH, v_cache_BSKH)), "a layer's cache is one piece"
    assert block_tables_RB.stride(1) == context_lens_R.stride(0) == 1, "tables and lengths are contiguous"
    assert min_split_keys % tiling.keys == 0, "splits are whole tiles"
    # From shapes alone: no request can have more keys than the tables are wide.
    max_keys = block_tables_RB.shape[1] * block_size
    if window is not None:
        max_keys = min(max_keys, window)
    most_splits = max_splits(num_kv_heads)
    num_splits = min(most_splits, -(-max_keys // min_split_keys))
    shape = (num_requests, num_heads, num_splits) if num_splits > 1 else (0,)
    part_RNPH = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_RNH.device)
    log_sum_RNP = torch.empty(shape, dtype=torch.float32, device=q_RNH.device)
    group = num_heads // num_kv_heads
    _decode_kernel[num_requests, num_kv_heads, num_splits](
        q_RNH, k_cache_BSKH, v_cache_BSKH, out_RNH, part_RNPH, log_sum_RNP, block_tables_RB, context_lens_R,
        q_RNH.stride(0), out_RNH.stride(0), block_tables_RB.stride(0), head_dim**-0.5 * LOG2_E,
        k_scale, v_scale,
        GROUP=group, PADDED_GROUP=power_of_two(group), SLOT_WIDTH=num_kv_heads * head_dim, BLOCK_SIZE=block_size,
        WINDOW=window, HEAD_DIM=head_dim, PADDED_DIM=tiling.padded_head_dim, TILE_KEYS=tiling.keys,
        MAX_SPLITS=most_splits, MIN_SPLIT_KEYS=min_split_keys,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[num_requests, num_heads](
            part_RNPH, log_sum_RNP, out_RNH, context_lens_R, out_RNH.stride(0), num_splits,
            WINDOW=window, HEAD_DIM=head_dim, PADDED_DIM=tiling.padded_head_dim, TILE_KEYS=tiling.keys,
            MAX_SPLITS=most_splits, MIN_SPLIT_KEYS=min_split_keys,
        )  # fmt: skip


@triton.jit
def _keys_and_split(
    context_len,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
):
    """Return how many keys a request has, and how many of them make a split: whole tiles, at most `MAX_SPLITS`."""
    num_keys = context_len
    if WINDOW is not None:
        num_keys = tl.minimum(num_keys, WINDOW)
    split_keys = (num_keys + MAX_SPLITS * TILE_KEYS - 1) // (MAX_SPLITS * TILE_KEYS) * TILE_KEYS
    return num_keys, tl.maximum(split_keys, MIN_SPLIT_KEYS)


@triton.jit(do_not_specialize=["tables_ptr", "table_stride", "context_lens_ptr"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    log_sum_ptr,
    tables_ptr,
    context_lens_ptr,
    q_stride,
    out_stride,
    table_stride,
    scale,
    k_scale,
    v_scale,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
):
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + request).to(tl.int32)
    num_keys, split_keys = _keys_and_split(context_len, WINDOW, TILE_KEYS, MAX_SPLITS, MIN_SPLIT_KEYS)
    if (split > 0) & (split * split_keys >= num_keys):
        return
    first = context_len - num_keys + split * split_keys
    stop = tl.minimum(first + split_keys, context_len)

    heads_G, dims_H = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
    is_head_GH = (heads_G < GROUP)[:, None] & (dims_H < HEAD_DIM)[None, :]
    head_G = kv_head * GROUP + heads_G
    offsets_GH = head_G[:, None] * HEAD_DIM + dims_H[None, :]
    q_GH = tl.load(q_ptr + request * q_stride + offsets_GH, mask=is_head_GH, other=0.0)

    head_offset = kv_head * HEAD_DIM
    largest_G = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    sum_G = tl.full([PADDED_GROUP], 0.0, tl.float32)
    product_GH = tl.full([PADDED_GROUP, PADDED_DIM], 0.0, tl.float32)
    for start in range(first, stop, TILE_KEYS):
        keys_C = start + tl.arange(0, TILE_KEYS)
        is_key_C = keys_C < stop
        largest_G, sum_G, product_GH = attend_tile(
            q_GH, k_ptr + head_offset, v_ptr + head_offset, tables_ptr + request * table_stride,
            keys_C, is_key_C, is_key_C[None, :], scale, largest_G, sum_G, product_GH,
            k_scale, v_scale, SLOT_WIDTH, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
    context_GH, log_sum_G = normalise(largest_G, sum_G, product_GH)
    if num_keys > split_keys:
        part_G = (request * tl.num_programs(1) * GROUP + head_G) * tl.num_programs(2) + split
        tl.store(part_ptr + part_G[:, None] * HEAD_DIM + dims_H[None, :], context_GH, mask=is_head_GH)
        tl.store(log_sum_ptr + part_G, log_sum_G, mask=heads_G < GROUP)
    else:
        rounded_GH = round_to(context_GH, out_ptr.dtype.element_ty)
        tl.store(out_ptr + request * out_stride + offsets_GH, rounded_GH, mask=is_head_GH)


@triton.jit(do_not_specialize=["num_places", "context_lens_ptr"])
def _merge_kernel(
    part_ptr,
    log_sum_ptr,
    out_ptr,
    context_lens_ptr,
    out_stride,
    num_places,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
):
    """Weight each split's context by its share of the sum over all keys: exp2(its log sum - that of all)."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context_len = tl.load(context_lens_ptr + request).to(tl.int32)
    num_keys, split_keys = _keys_and_split(context_len, WINDOW, TILE_KEYS, MAX_SPLITS, MIN_SPLIT_KEYS)
    if num_keys <= split_keys:  # a single split, which is the result
        return
    splits_P, dims_H = tl.arange(0, MAX_SPLITS), tl.arange(0, PADDED_DIM)
    is_split_P = splits_P * split_keys < num_keys
    is_part_PH = is_split_P[:, None] & (dims_H < HEAD_DIM)[None, :]
    part_P = (request * tl.num_programs(1) + head) * num_places + splits_P
    log_sum_P = tl.load(log_sum_ptr + part_P, mask=is_split_P, other=float("-inf"))
    context_PH = tl.load(part_ptr + part_P[:, None] * HEAD_DIM + dims_H[None, :], mask=is_part_PH, other=0.0)

    base = tl.max(log_sum_P, 0)
    weight_P = tl.exp2(log_sum_P - base)
    merged_H = tl.div_rn(tl.sum(context_PH * weight_P[:, None], 0), tl.sum(weight_P, 0))
    merged_H = round_to(merged_H, out_ptr.dtype.element_ty)
    tl.store(out_ptr + request * out_stride + head * HEAD_DIM + dims_H, merged_H, mask=dims_H < HEAD_DIM)
