"""Attention by its definition, in float64, and how far rounding may carry each head of each row.

The bound of an error is that of docs/how-verdicts-work.md, taken head by head, so that none dilutes another.

    bound = 2.34 + 25 (1 + amplification) fine + 6 sensitivity fine + 4 amplification + underflow

in units of one rounding to the dtype, where `fine` is one of float32. For p the probabilities, v the values, o the
output and b_j what the rounding of a score is relative to,

    amplification = sqrt(sum_j p_j^2 |v_j|^2) / |o|         sensitivity = sqrt(sum_j p_j^2 b_j^2 |v_j - o|^2) / |o|

The same holds of parts of a split that are merged, in float32 and without the rounding of the products: p are then the
weights of the parts, v their outputs and b_j the sizes of the logarithms.

Shapes: T rows, C context tokens, P parts, N query heads, K KV heads, H head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.base.metrics import largest_rounding, rounding_unit
from harness.properties.attention.case import AttentionCase, Tensors

_ACCUMULATION = 25
_SCORES = 6
_PRODUCTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The output that attention should give."""

    out_TNH: torch.Tensor
    """float64."""
    bound_TN: torch.Tensor
    """float64: the largest relative error of a head of a row, in roundings."""


def context_of(
    k_cache_BSKH: torch.Tensor, v_cache_BSKH: torch.Tensor, block_table: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read K and V, each [C, K, H], of a request's first `num_tokens` positions."""
    return tuple(x[list(block_table)].flatten(0, 1)[:num_tokens] for x in (k_cache_BSKH, v_cache_BSKH))  # type: ignore[return-value]


def expected_output(case: AttentionCase, tensors: Tensors, *, rounds_scores: bool = False) -> Expected:
    """Compute every row of a case."""
    parts = []
    q_chunks = tensors.q_TNH.double().split(list(case.query_lens))
    for q_TNH, table, context_len in zip(q_chunks, case.block_tables, case.context_lens, strict=True):
        k_CKH, v_CKH = context_of(tensors.k_cache_BSKH, tensors.v_cache_BSKH, table, context_len)
        k_NCH, v_NCH = (x.double().repeat_interleave(case.group_size, dim=1).transpose(0, 1) for x in (k_CKH, v_CKH))
        visible_TC = _visible(len(q_TNH), context_len, case.window).to(q_TNH.device)
        parts.append(_attend(q_TNH.transpose(0, 1), k_NCH, v_NCH, visible_TC, case, rounds_scores))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return Expected(out_TNH=columns[0], bound_TN=columns[1])


def merged_output(out_PTNH: torch.Tensor, log_sum_PTN: torch.Tensor) -> Expected:
    """Merge the parts of a split, given in float64 with the logarithms of their sums of exp(score)."""
    w_PTN = torch.softmax(log_sum_PTN, dim=0)
    merged_TNH = (w_PTN[..., None] * out_PTNH).sum(dim=0)
    norm_TN = merged_TNH.norm(dim=-1)
    amplification_TN = (w_PTN * out_PTNH.norm(dim=-1)).square().sum(dim=0).sqrt() / norm_TN
    size_PTN = torch.where(w_PTN > 0, log_sum_PTN.abs(), 0.0) + log_sum_PTN.amax(dim=0).abs()
    spread_PTN = (out_PTNH - merged_TNH).norm(dim=-1)
    sensitivity_TN = (w_PTN * size_PTN * spread_PTN).square().sum(dim=0).sqrt() / norm_TN
    bound_TN = largest_rounding(torch.float32) + _ACCUMULATION * (1 + amplification_TN) + _SCORES * sensitivity_TN
    return Expected(out_TNH=merged_TNH, bound_TN=bound_TN)


def _visible(num_rows: int, context_len: int, window: int | None) -> torch.Tensor:
    """Return [T, C] bool: row t is position i = C - T + t, and sees i - window + 1 to i."""
    positions_T1 = torch.arange(context_len - num_rows, context_len)[:, None]
    keys_C = torch.arange(context_len)
    visible_TC = keys_C <= positions_T1
    if window is not None:
        visible_TC &= keys_C > positions_T1 - window
    return visible_TC


def _attend(
    q_NTH: torch.Tensor,
    k_NCH: torch.Tensor,
    v_NCH: torch.Tensor,
    visible_TC: torch.Tensor,
    case: AttentionCase,
    rounds_scores: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = case.true_scale
    score_NTC = q_NTH @ k_NCH.transpose(1, 2) * scale
    # What a score's rounding is relative to: the size of its products, not of their sum.
    size_NTC = q_NTH.norm(dim=-1)[..., None] * k_NCH.norm(dim=-1)[:, None] * abs(scale)
    if case.softcap is not None:
        tanh_NTC = torch.tanh(score_NTC / case.softcap)
        score_NTC = case.softcap * tanh_NTC
        size_NTC = size_NTC * (1 - tanh_NTC.square()) + score_NTC.abs()
    score_NTC = score_NTC.masked_fill(~visible_TC, -math.inf)
    p_NTC = torch.where(visible_TC, (score_NTC - score_NTC.logsumexp(dim=-1, keepdim=True)).exp(), 0.0)
    out_NTH = p_NTC @ v_NCH
    norm_NT = out_NTH.norm(dim=-1)
    v2_NC, p2_NTC = v_NCH.square().sum(-1), p_NTC.square()
    amplification_NT = (p2_NTC @ v2_NC[..., None])[..., 0].sqrt() / norm_NT
    spread_NTC = torch.cdist(out_NTH, v_NCH, compute_mode="donot_use_mm_for_euclid_dist")
    sensitivity_NT = (p_NTC * size_NTC * spread_NTC).square().sum(dim=-1).sqrt() / norm_NT
    bound_NT = _bound(case, amplification_NT, sensitivity_NT, norm_NT, rounds_scores=rounds_scores)
    return out_NTH.transpose(0, 1), bound_NT.T


def _bound(
    case: AttentionCase,
    amplification: torch.Tensor,
    sensitivity: torch.Tensor,
    norm: torch.Tensor,
    *,
    rounds_scores: bool,
) -> torch.Tensor:
    """Return the bound in roundings; 0 if no key is seen, so that the output must be 0."""
    dtype = case.torch_dtype
    unit = rounding_unit(dtype)
    fine = rounding_unit(torch.float32) / unit
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = (
        largest_rounding(dtype)
        + _ACCUMULATION * (1 + amplification) * fine
        + _SCORES * sensitivity * (1.0 if rounds_scores else fine)
        + _PRODUCTS * amplification
        + math.sqrt(case.head_dim) * smallest / (norm * unit)
    )
    return torch.where(norm > 0, bound, 0.0)
