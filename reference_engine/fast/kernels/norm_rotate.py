"""The heads of q and k normalised, where the family does, and rotated by their positions, in one sweep.

What `layers.RMSNorm` and `rotary.apply_rotary` do in some twenty-five launches, rounded where they round: the
normalised head, its product with the weight, both products of the rotation, and their sum.

Shapes: T rows, N query heads, K KV heads, A = N + K, H head dim, W width of the fused projection, E heads of a program,
P half a head (padded).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import round_to

__all__ = ["norm_rotate"]

HEADS_OF_A_PROGRAM = 8


def norm_rotate(
    qkv_TW: torch.Tensor,
    cos_T1H: torch.Tensor,
    sin_T1H: torch.Tensor,
    q_weight_H: torch.Tensor | None,
    k_weight_H: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    keeps_normed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k side by side, [T, A, H], rotated; and normalised only, which is empty unless `keeps_normed`.

    Args:
        qkv_TW: the fused projection: heads of q, of k, and what is left alone.
        cos_T1H: of the angles, both halves alike.
        sin_T1H: likewise.
        q_weight_H: of the norm of q; None: q and k are not normalised.
        k_weight_H: of the norm of k.
        eps: of both norms.
        num_heads: N.
        num_kv_heads: K.
        keeps_normed: whether an observer needs the values between norm and rotation.
    """
    num_rows, num_both, head_dim = len(qkv_TW), num_heads + num_kv_heads, cos_T1H.shape[-1]
    assert qkv_TW.is_contiguous(), "a row of the projection follows the one before"
    assert cos_T1H.is_contiguous(), "cosines are one piece"
    assert sin_T1H.is_contiguous(), "sines are one piece"
    rotated_TAH = qkv_TW.new_empty(num_rows, num_both, head_dim)
    normed_TAH = torch.empty_like(rotated_TAH) if keeps_normed else qkv_TW.new_empty(0)
    _norm_rotate_kernel[num_rows, triton.cdiv(num_both, HEADS_OF_A_PROGRAM)](
        qkv_TW, cos_T1H, sin_T1H, q_weight_H, k_weight_H, rotated_TAH, normed_TAH, eps, qkv_TW.stride(0),
        NUM_HEADS=num_heads, NUM_BOTH=num_both, HALF=head_dim // 2, PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=HEADS_OF_A_PROGRAM, KEEPS_NORMED=keeps_normed, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return rotated_TAH, normed_TAH


@triton.jit
def _norm_rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rotated_ptr,
    normed_ptr,
    eps,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_BOTH: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads_E, dims_P = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED_HALF)
    is_dim_P = dims_P < HALF
    is_element_EP = (heads_E < NUM_BOTH)[:, None] & is_dim_P[None, :]
    offsets_EP = heads_E[:, None] * (2 * HALF) + dims_P[None, :]
    dtype: tl.constexpr = rotated_ptr.dtype.element_ty
    at_EP = qkv_ptr + row * qkv_stride + offsets_EP
    first_EP = tl.load(at_EP, mask=is_element_EP, other=0.0).to(tl.float32)
    second_EP = tl.load(at_EP + HALF, mask=is_element_EP, other=0.0).to(tl.float32)

    to_EP = row * (NUM_BOTH * 2 * HALF) + offsets_EP
    if q_weight_ptr is not None:
        squares_E = tl.sum(first_EP * first_EP, 1) + tl.sum(second_EP * second_EP, 1)
        scale_E1 = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares_E, 2.0 * HALF) + eps))[:, None]
        is_query_E1 = (heads_E < NUM_HEADS)[:, None]
        first_EP = _weighted(first_EP, scale_E1, is_query_E1, q_weight_ptr, k_weight_ptr, dims_P, is_dim_P, dtype)
        second_EP = _weighted(
            second_EP, scale_E1, is_query_E1, q_weight_ptr + HALF, k_weight_ptr + HALF, dims_P, is_dim_P, dtype
        )
        if KEEPS_NORMED:
            tl.store(normed_ptr + to_EP, first_EP, mask=is_element_EP)
            tl.store(normed_ptr + to_EP + HALF, second_EP, mask=is_element_EP)
    angle_P = row * (2 * HALF) + dims_P
    cos_1P = tl.load(cos_ptr + angle_P, mask=is_dim_P, other=0.0).to(tl.float32)[None, :]
    sin_1P = tl.load(sin_ptr + angle_P, mask=is_dim_P, other=0.0).to(tl.float32)[None, :]
    first_EP, second_EP = first_EP.to(tl.float32), second_EP.to(tl.float32)
    turned_first_EP = _product(first_EP, cos_1P, dtype) - _product(second_EP, sin_1P, dtype)
    turned_second_EP = _product(second_EP, cos_1P, dtype) + _product(first_EP, sin_1P, dtype)
    tl.store(rotated_ptr + to_EP, round_to(turned_first_EP, dtype), mask=is_element_EP)
    tl.store(rotated_ptr + to_EP + HALF, round_to(turned_second_EP, dtype), mask=is_element_EP)


@triton.jit
def _weighted(x_EP, scale_E1, is_query_E1, q_weight_ptr, k_weight_ptr, dims_P, is_dim_P, dtype: tl.constexpr):
    """Return half of the heads, scaled and multiplied by the weight of q or of k."""
    q_weight_1P = tl.load(q_weight_ptr + dims_P, mask=is_dim_P, other=0.0).to(tl.float32)[None, :]
    k_weight_1P = tl.load(k_weight_ptr + dims_P, mask=is_dim_P, other=0.0).to(tl.float32)[None, :]
    normed_EP = round_to(x_EP * scale_E1, dtype).to(tl.float32)
    return round_to(tl.where(is_query_E1, q_weight_1P, k_weight_1P) * normed_EP, dtype)


@triton.jit
def _product(x_EP, y_1P, dtype: tl.constexpr):
    return round_to(x_EP * y_1P, dtype).to(tl.float32)
