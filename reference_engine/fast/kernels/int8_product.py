"""The product of rows and a weight in int8, each with scales: integers are added up exactly, and scaled once.

Shapes: T rows, I inputs, O outputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import round_to

__all__ = ["int8_product"]

ROWS, OUTPUTS, INPUTS = 16, 64, 128
MANY_ROWS = 64
"""Rows of a program where there are more than `ROWS`."""


def int8_product(
    x_TI: torch.Tensor,
    row_scale_T1: torch.Tensor,
    weight_OI: torch.Tensor,
    scale_O1: torch.Tensor,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return x W^T times both scales, plus the bias, in float32 and rounded once to `dtype`: [T, O]."""
    (num_rows, num_inputs), num_outputs = x_TI.shape, len(weight_OI)
    assert all(item.is_contiguous() for item in (x_TI, weight_OI)), "inputs lie side by side"
    assert num_inputs <= 1 << 17, "more products of int8 would not fit into 32 bits"
    out_TO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_TI.device)
    rows = ROWS if num_rows <= ROWS else MANY_ROWS
    _int8_kernel[triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, OUTPUTS)](
        x_TI, row_scale_T1, weight_OI, scale_O1, scale_O1 if bias_O is None else bias_O, out_TO,
        num_rows, num_outputs, num_inputs,
        HAS_BIAS=bias_O is not None, ROWS=rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out_TO


@triton.jit
def _int8_kernel(
    x_ptr,
    row_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    rows_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs_O = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row_T, is_output_O = rows_T < num_rows, outputs_O < num_outputs
    sums_TO = tl.zeros((ROWS, OUTPUTS), tl.int32)
    for first in range(0, num_inputs, INPUTS):
        inputs_I = first + tl.arange(0, INPUTS)
        is_input_I = inputs_I < num_inputs
        x_TI = tl.load(
            x_ptr + rows_T.to(tl.int64)[:, None] * num_inputs + inputs_I[None, :],
            mask=is_row_T[:, None] & is_input_I[None, :], other=0,
        )  # fmt: skip
        weight_OI = tl.load(
            weight_ptr + outputs_O.to(tl.int64)[:, None] * num_inputs + inputs_I[None, :],
            mask=is_output_O[:, None] & is_input_I[None, :], other=0,
        )  # fmt: skip
        sums_TO += tl.dot(x_TI, tl.trans(weight_OI), out_dtype=tl.int32)
    row_scale_T = tl.load(row_scale_ptr + rows_T, mask=is_row_T, other=0.0)
    scale_O = tl.load(scale_ptr + outputs_O, mask=is_output_O, other=0.0)
    product_TO = sums_TO.to(tl.float32) * row_scale_T[:, None] * scale_O[None, :]
    if HAS_BIAS:
        product_TO += tl.load(bias_ptr + outputs_O, mask=is_output_O, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows_T.to(tl.int64)[:, None] * num_outputs + outputs_O[None, :],
        round_to(product_TO, out_ptr.dtype.element_ty), mask=is_row_T[:, None] & is_output_O[None, :],
    )  # fmt: skip
