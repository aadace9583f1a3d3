"""Weights in the order in which a CPU's matrix product reads them.

A product of few rows is bound by how fast its weights come from memory. oneDNN reads a blocked layout in one sweep;
from a plain matrix it is packed anew in every call (bfloat16), or another library's kernel runs that is made for
many rows (float32). Torch has the blocked layout for its own compiler; these are the compiler's operators.

A CPU without instructions for 16 bits has no such product for them, and torch's own takes two to five times as long as
the one in float32. There a second copy of the weight is packed in float32 (see `widen`).

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from reference_engine.fast.host_memory import available_bytes

__all__ = [
    "can_widen",
    "copy_for_rows",
    "is_widened",
    "max_few_rows",
    "pack",
    "packed_linear",
    "widen",
    "widened_linear",
]

MIN_ELEMENTS = 1 << 18
"""Below it a weight stays in the cache, and the operator's own overhead (10 us more than a plain product's) counts."""
EXPECTED_ROWS = 16
"""The number of rows that the layout is chosen for. This one was the best, or close to it, from 1 row to 2048."""
EXPECTED_ROWS_AVX2 = 1
"""The same where vectors have 256 bits: a quarter faster than the layout for 16 at one row, as fast from 16 rows on."""
MAX_MEMORY_SHARE = 0.5
"""Of the memory that is available, what second copies may take."""
MAX_FEW_ROWS, MAX_FEW_ROWS_AVX512 = 64, 256
"""Rows in float32 above which MKL's product, which packs plain weights anew in every call, is the faster one. With
vectors of 512 bits it was half as fast as the kernel at 128 rows and four threads."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def pack(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the weight in oneDNN's layout, or itself where that does not exist or brings nothing.

    A packed tensor has the same shape and dtype; only `packed_linear` can read it.
    """
    if not _is_large(weight_OI) or not _is_served(weight_OI.dtype):
        return weight_OI
    return _reordered(weight_OI)


def packed_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + bias, [T, O], for a packed weight."""
    product_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return product_TO


def widen(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Return a second copy of a weight, packed in float32; None if `is_widened` says that it brings nothing."""
    return _reordered(weight_OI.to(torch.float32)) if is_widened(weight_OI) else None


def widened_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + bias, [T, O] in x's dtype, for a packed weight: all in the weight's, rounded once at the end."""
    bias_O = None if bias_O is None else bias_O.to(weight_OI.dtype)
    return packed_linear(x_TI.to(weight_OI.dtype), weight_OI, bias_O).to(x_TI.dtype)


def copy_for_rows(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """Return a packed copy of a weight for products of many rows; None if it is not faster."""
    return _reordered(weight_OI) if _is_copied(weight_OI) else None


def max_few_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows the kernel `linear` of `cpp_operators` is as fast as oneDNN or faster.

    That is one where oneDNN has instructions for 16 bits, any number where it has none.
    """
    if dtype == torch.float32:
        return MAX_FEW_ROWS_AVX512 if torch.backends.cpu.get_cpu_capability() == "AVX512" else MAX_FEW_ROWS
    return 1 if _is_served(dtype) else sys.maxsize


def is_widened(weight_OI: torch.Tensor) -> bool:
    """Whether products of several rows with this weight are faster in float32."""
    is_wanted = weight_OI.dtype in SIXTEEN_BITS and _is_large(weight_OI)
    return is_wanted and _is_served(torch.float32) and not _is_served(weight_OI.dtype)


def can_widen(weights: Iterable[torch.Tensor], *, num_engines: int = 1, has_few_rows: bool = False) -> bool:
    """Whether memory holds the second copies, for each of `num_engines` that are opened on this machine together.

    They are those of `copy_for_rows` with `has_few_rows`, else those of `widen`.
    """
    num_bytes = 0
    for weight in weights:
        if has_few_rows:
            num_bytes += weight.nbytes if _is_copied(weight) else 0
        elif is_widened(weight):
            num_bytes += weight.numel() * torch.float32.itemsize
    return num_bytes * num_engines <= MAX_MEMORY_SHARE * available_bytes()


def _is_copied(weight_OI: torch.Tensor) -> bool:
    return weight_OI.dtype in SIXTEEN_BITS and _is_large(weight_OI) and _is_served(weight_OI.dtype)


def _is_large(weight_OI: torch.Tensor) -> bool:
    return weight_OI.device.type == "cpu" and weight_OI.dim() == 2 and weight_OI.numel() >= MIN_ELEMENTS


def _reordered(weight_OI: torch.Tensor) -> torch.Tensor:
    is_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    num_rows = EXPECTED_ROWS_AVX2 if is_avx2 else EXPECTED_ROWS
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, num_rows)
    return packed


def _is_served(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
