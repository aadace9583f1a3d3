"""The product of one row with a weight, as decoding one request needs it: it is bound by reading the weight.

A program computes a few outputs from all inputs. It multiplies and adds in float32, in an order that its constants
decide, and rounds once. A weight in float8 is dequantised on the way, and rounded to the dtype of the row.

Shapes: I inputs, O outputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from reference_engine.fast.kernels.interpreter import round_to

__all__ = ["row_product"]

OUTPUTS, INPUTS, NUM_WARPS = 2, 1024, 4
"""Outputs of a program, inputs that it reads at a time, and its warps: on an H200 faster than torch's product for every
weight that was tried (reports/h200/engine.md). No step has been timed with these sizes."""


def row_product(
    x_1I: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    scale_OB: torch.Tensor | None = None,
    block: int = 1,
) -> torch.Tensor:
    """Return x W^T + bias, [1, O] in x's dtype, for one row; `scale_OB`, float32, are scales of `block` inputs each."""
    num_outputs, num_inputs = weight_OI.shape
    assert x_1I.shape == (1, num_inputs), "one row, as wide as the weight"
    assert all(x.is_contiguous() for x in (x_1I, weight_OI)), "inputs lie side by side"
    out_1O = x_1I.new_empty(1, num_outputs)
    _row_product_kernel[(triton.cdiv(num_outputs, OUTPUTS),)](
        x_1I, weight_OI, x_1I if bias_O is None else bias_O, out_1O,
        x_1I if scale_OB is None else scale_OB, 0 if scale_OB is None else scale_OB.shape[1], block,
        num_outputs, num_inputs, HAS_SCALE=scale_OB is not None,
        HAS_BIAS=bias_O is not None, OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_1O


@triton.jit
def _row_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scale_ptr,
    num_blocks,
    block,
    num_outputs,
    num_inputs,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    outputs_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_O = outputs_O < num_outputs
    rows_O1 = weight_ptr + outputs_O.to(tl.int64)[:, None] * num_inputs
    sums_OI = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs_I = first + tl.arange(0, INPUTS)
        is_input_I = inputs_I < num_inputs
        x_I = tl.load(x_ptr + inputs_I, mask=is_input_I, other=0.0).to(tl.float32)
        # Read once: it need not stay in the cache.
        weight_OI = tl.load(
            rows_O1 + inputs_I[None, :], mask=is_output_O[:, None] & is_input_I[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        weight_OI = weight_OI.to(tl.float32)
        if HAS_SCALE:
            scale_OI = tl.load(
                scale_ptr + outputs_O[:, None] * num_blocks + (inputs_I // block)[None, :],
                mask=is_output_O[:, None] & is_input_I[None, :], other=0.0,
            )  # fmt: skip
            weight_OI = round_to(weight_OI * scale_OI, out_ptr.dtype.element_ty).to(tl.float32)
        sums_OI += weight_OI * x_I[None, :]
    total_O = tl.sum(sums_OI, axis=1)
    if HAS_BIAS:
        total_O += tl.load(bias_ptr + outputs_O, mask=is_output_O, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs_O, round_to(total_O, out_ptr.dtype.element_ty), mask=is_output_O)
