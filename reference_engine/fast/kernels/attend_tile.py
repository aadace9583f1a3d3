"""One tile of query rows against one tile of keys: the step that paged prefill and paged decode share.

Algorithm 1 of FlashAttention-2 (Dao 2023, arXiv:2307.08691): keys are visited tile by tile, and of each row only the
largest score so far, the sum of exp(score - largest) and the equally scaled product with V are kept. When a larger
score turns up, sum and product are scaled down. Scores are in base 2 (multiplied by log2(e) beforehand), because the
GPU's exponential is; a caller that needs the logarithm of the sum gets it as largest + log2(sum).

Shapes: M rows of a tile, C keys of a tile, H head dim (padded to a power of two).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import INTERPRETED, round_to

__all__ = ["LOG2_E", "attend_tile", "normalise"]

LOG2_E = 1.4426950408889634


@triton.jit
def attend_tile(
    q_MH,
    k_ptr,
    v_ptr,
    table_ptr,
    keys_C,
    is_read_C,
    is_visible_MC,
    scale,
    largest_M,
    sum_M,
    product_MH,
    k_scale,
    v_scale,
    SLOT_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Return `largest_M`, `sum_M` and `product_MH` with the keys at positions `keys_C` taken in.

    `k_ptr` and `v_ptr` point at a KV head in slot 0, `table_ptr` at the request's block table, whose entries outside
    `is_read_C` are not looked at. `scale` is log2(e) / sqrt(H); what is stored in float8 is multiplied by `k_scale` or
    `v_scale`, and rounded to the dtype of the queries. Weights are rounded to the dtype of V before they meet
    it, as FlashAttention does: matrix units take both in one dtype. Their sum is that of the weights before.
    """
    # Each key goes through the table by itself: tiles need not fit blocks, and any block size will do.
    block_C = tl.load(table_ptr + keys_C // BLOCK_SIZE, mask=is_read_C, other=0).to(tl.int64)
    slot_C = block_C * BLOCK_SIZE + keys_C % BLOCK_SIZE
    dims_H = tl.arange(0, PADDED_DIM)
    offsets_CH = slot_C[:, None] * SLOT_WIDTH + dims_H[None, :]
    # What is not read must be 0: it meets a weight of 0 below, and 0 * NaN would be NaN.
    is_read_CH = is_read_C[:, None] & (dims_H < HEAD_DIM)[None, :]
    k_CH = tl.load(k_ptr + offsets_CH, mask=is_read_CH, other=0.0)
    v_CH = tl.load(v_ptr + offsets_CH, mask=is_read_CH, other=0.0)
    dtype: tl.constexpr = q_MH.dtype
    if k_CH.dtype != dtype:  # a cache in float8, with scales
        k_CH = round_to(k_CH.to(tl.float32) * k_scale, dtype)
        v_CH = round_to(v_CH.to(tl.float32) * v_scale, dtype)
    if INTERPRETED and dtype == tl.bfloat16:
        q_MH, k_CH, v_CH = q_MH.to(tl.float32), k_CH.to(tl.float32), v_CH.to(tl.float32)

    # "ieee" keeps float32 in float32; the default would round it to TF32. Narrower dtypes are not affected.
    score_MC = tl.dot(q_MH, tl.trans(k_CH), input_precision="ieee") * scale
    score_MC = tl.where(is_visible_MC, score_MC, float("-inf"))
    new_largest_M = tl.maximum(largest_M, tl.max(score_MC, 1))
    # A row that has seen no key yet: -inf - -inf would be NaN.
    base_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)
    weight_MC = tl.exp2(score_MC - base_M[:, None])
    shrink_M = tl.exp2(largest_M - base_M)
    new_sum_M = sum_M * shrink_M + tl.sum(weight_MC, 1)
    new_product_MH = product_MH * shrink_M[:, None] + tl.dot(round_to(weight_MC, dtype), v_CH, input_precision="ieee")
    return new_largest_M, new_sum_M, new_product_MH


@triton.jit
def normalise(largest_M, sum_M, product_MH):
    """Return the context, and log2 of each row's sum of exp2(score).

    A row that has seen no key gets 0 and -inf; a NaN stays NaN.
    """
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    return product_MH / sum_M[:, None], largest_M + tl.log2(sum_M)
