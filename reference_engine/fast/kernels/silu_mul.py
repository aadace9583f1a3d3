"""silu(gate) * up in one sweep over the fused projection, rounded where torch's two operations round: silu, product.

Shapes: T rows, F ffn.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import round_to

__all__ = ["silu_mul"]

COLUMNS_OF_A_PROGRAM = 1024


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return [T, F] of a projection that has gate on the left and up on the right."""
    num_rows, width = len(gate_up_T2F), gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.is_contiguous(), "a row of the projection follows the one before"
    out_TF = gate_up_T2F.new_empty(num_rows, width)
    _silu_mul_kernel[num_rows, triton.cdiv(width, COLUMNS_OF_A_PROGRAM)](
        gate_up_T2F, out_TF, WIDTH=width, COLUMNS=COLUMNS_OF_A_PROGRAM, num_warps=4, enable_fp_fusion=False
    )
    return out_TF


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns_F = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_F = columns_F < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    at_F = gate_up_ptr + row * (2 * WIDTH) + columns_F
    gate_F = tl.load(at_F, mask=is_column_F, other=0.0).to(tl.float32)
    up_F = tl.load(at_F + WIDTH, mask=is_column_F, other=0.0).to(tl.float32)
    # x / (1 + exp(-x)) without a power that overflows: of negative x both sides are multiplied by exp(x).
    power_F = tl.exp(-tl.abs(gate_F))
    silu_F = tl.div_rn(gate_F * tl.where(gate_F < 0, power_F, 1.0), 1.0 + power_F)
    silu_F = round_to(silu_F, dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns_F, round_to(silu_F * up_F, dtype), mask=is_column_F)
