"""What Triton's interpreter does otherwise than a GPU.

It keeps bfloat16 as bit patterns, which it multiplies as the integers they look like, and rounds towards zero where a
GPU rounds to nearest (triton#11584; so as of 3.9). Under the interpreter bfloat16 tiles are therefore widened to
float32, which is exact, and outputs stay float32 for torch to round. Other dtypes go the same way in both.

It must be chosen before Python starts, with TRITON_INTERPRET=1: torch may import Triton early. Triton before 3.7 needs
numpy before 2.4 to interpret loops (triton#9171).
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
