"""What Triton's interpreter does otherwise than a GPU.

It keeps bfloat16 as bit patterns, which it multiplies as the integers they look like, and rounds towards zero where a
GPU rounds to nearest (triton#11584; as of 3.9). So under the interpreter bfloat16 tiles are widened to float32, which is
exact, and outputs stay float32 for torch to round. Other dtypes go the same way in both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "output_dtype"]

# What `triton.jit` goes by, too: fixed when the kernels are imported.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to have attention write, where q, k and v are of `dtype`."""
    return torch.float32 if INTERPRETED.value and dtype == torch.bfloat16 else dtype
