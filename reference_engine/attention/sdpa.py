"""Scaled dot-product attention over packed rows: what the torch backends share.

Shapes: T rows of one request, R requests, C context tokens, N query heads, K KV heads, G = N/K, H head dim.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend_chunk", "attend_single", "first_key"]


def attend_chunk(
    q_TNH: torch.Tensor,
    k_CKH: torch.Tensor,
    v_CKH: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the context [T, N, H] of one request's last T of C positions.

    `scale` is the factor of the scores; None: 1 / sqrt(H). Values may have another width than keys.
    With a window, keys before the first row's are not needed, and not looked at.
    """
    num_rows = len(q_TNH)
    first = first_key(len(k_CKH), num_rows, window)
    k_CKH, v_CKH = k_CKH[first:], v_CKH[first:]
    context_len = len(k_CKH)
    mask: torch.Tensor | None = None
    if window is not None and context_len > window:
        mask = _band(num_rows, context_len, window, q_TNH.device)
    elif 1 < num_rows < context_len:
        # is_causal aligns the mask at the top left, which is wrong for fewer rows than keys.
        mask = _lower_right(num_rows, context_len, q_TNH.device)
    context_1NTH = scaled_dot_product_attention(
        q_TNH.transpose(0, 1)[None],
        k_CKH.transpose(0, 1)[None],
        v_CKH.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and num_rows > 1,
        scale=scale or q_TNH.shape[-1] ** -0.5,
        enable_gqa=True,
    )
    return context_1NTH[0].transpose(0, 1)


def first_key(context_len: int, num_rows: int, window: int | None) -> int:
    """Return the first of `context_len` positions that the last `num_rows` of them see."""
    return 0 if window is None else max(0, context_len - num_rows - window + 1)


def _lower_right(num_rows: int, context_len: int, device: torch.device) -> torch.Tensor:
    """Return [T, C]: row t is position C - T + t and sees all positions up to it."""
    if device.type == "cpu":
        return torch.ones(num_rows, context_len, dtype=torch.bool).tril(context_len - num_rows)
    from torch.nn.attention.bias import causal_lower_right  # here, since it imports torch's compiler, which takes 1.2 s

    return causal_lower_right(num_rows, context_len)


def _band(num_rows: int, context_len: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [T, C] bool: row t is position i = C - T + t and sees positions i - window + 1 to i."""
    positions_T1 = torch.arange(context_len - num_rows, context_len, device=device)[:, None]
    keys_C = torch.arange(context_len, device=device)
    return (keys_C <= positions_T1) & (keys_C > positions_T1 - window)


def attend_single(
    q_RNH: torch.Tensor,
    k_RCKH: torch.Tensor,
    v_RCKH: torch.Tensor,
    mask_R11C: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the context [R, N, H] of one row per request; `mask_R11C` is false where a shorter request has no key.

    `scale` is that of `attend_chunk`.
    """
    num_requests, _, num_kv_heads, head_dim = k_RCKH.shape
    scale = scale or head_dim**-0.5
    if q_RNH.dtype == torch.float32 and q_RNH.device.type == "cpu":  # a third faster; in bfloat16 eight times slower
        context_RN1H = scaled_dot_product_attention(
            q_RNH[:, :, None],
            k_RCKH.transpose(1, 2),
            v_RCKH.transpose(1, 2),
            attn_mask=mask_R11C,
            scale=scale,
            enable_gqa=True,
        )
        return context_RN1H[:, :, 0]
    # The query heads of one KV head become its rows: no key is repeated, and a mask does not rule out the fast kernels.
    q_RKGH = q_RNH.reshape(num_requests, num_kv_heads, -1, head_dim)
    context_RKGH = scaled_dot_product_attention(
        q_RKGH,
        k_RCKH.transpose(1, 2),
        v_RCKH.transpose(1, 2),
        attn_mask=mask_R11C,
        scale=scale,
    )
    return context_RKGH.flatten(1, 2)
