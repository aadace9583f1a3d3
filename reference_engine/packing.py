"""Weights in the order in which a CPU's matrix product reads them.

A product of few rows is bound by how fast its weights come from memory. oneDNN reads a blocked layout in one sweep;
from a plain matrix it is packed anew in every call (bfloat16), or another library's kernel runs that is made for
many rows (float32). Torch has the blocked layout for its own compiler; these are the compiler's operators.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch

__all__ = ["pack", "packed_linear"]

MIN_ELEMENTS = 1 << 18
"""Below it a weight stays in the cache, and the operator's own overhead (10 us more than a plain product's) counts."""
EXPECTED_ROWS = 16
"""What the layout is chosen for. One chosen for 16 rows was the best, or close to it, from 1 row to 2048."""


def pack(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the weight in oneDNN's layout, or itself where that does not exist or brings nothing.

    A packed tensor has the same shape and dtype; only `packed_linear` can read it.
    """
    if weight_OI.device.type != "cpu" or weight_OI.numel() < MIN_ELEMENTS or not _is_served(weight_OI.dtype):
        return weight_OI
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, EXPECTED_ROWS)
    return packed


def packed_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + bias, [T, O], for a packed weight."""
    product_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return product_TO


def _is_served(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
