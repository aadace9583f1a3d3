"""A layer's output added to the residual stream, and the sum normalised for the next layer, in one sweep.

What `x + delta` and `layers.RMSNorm` do in some eight launches, rounded where they round: the sum, the normalised row,
and its product with the weight.

Shapes: T rows, D hidden.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import round_to

__all__ = ["add_norm", "rms_norm"]


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of each row, [T, D] in the dtype of `x_TD`."""
    normed_TD = torch.empty_like(x_TD)
    _launch(x_TD, None, weight_D, None, normed_TD, eps)
    return normed_TD


def add_norm(
    x_TD: torch.Tensor, delta_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta and its norm, both [T, D] in the dtype of `x_TD`."""
    sum_TD, normed_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch(x_TD, delta_TD, weight_D, sum_TD, normed_TD, eps)
    return sum_TD, normed_TD


def _launch(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    sum_TD: torch.Tensor | None,
    normed_TD: torch.Tensor,
    eps: float,
) -> None:
    num_rows, width = x_TD.shape
    assert x_TD.is_contiguous(), "the residual stream is one piece"
    assert delta_TD is None or delta_TD.is_contiguous(), "what is added is one piece"
    padded = triton.next_power_of_2(width)
    _add_norm_kernel[num_rows,](
        x_TD, delta_TD, weight_D, sum_TD, normed_TD, eps, WIDTH=width, PADDED_WIDTH=padded,
        num_warps=min(16, max(1, padded // 512)), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _add_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    columns_D = tl.arange(0, PADDED_WIDTH)
    is_column_D = columns_D < WIDTH
    at_D = tl.program_id(0).to(tl.int64) * WIDTH + columns_D
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    x_D = tl.load(x_ptr + at_D, mask=is_column_D, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        sum_D = round_to(x_D + tl.load(delta_ptr + at_D, mask=is_column_D, other=0.0).to(tl.float32), dtype)
        tl.store(sum_ptr + at_D, sum_D, mask=is_column_D)
        x_D = sum_D.to(tl.float32)
    # Each rounding is an exact one: this factor is the whole row's.
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x_D * x_D, 0), WIDTH * 1.0) + eps))
    normed_D = round_to(x_D * scale, dtype).to(tl.float32)
    weight_D = tl.load(weight_ptr + columns_D, mask=is_column_D, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at_D, round_to(weight_D * normed_D, dtype), mask=is_column_D)
