"""Differences between Triton's interpreter and a GPU, made up for.

It keeps bfloat16 as bit patterns, which it multiplies as the integers they look like, and rounds towards zero where a
GPU rounds to nearest (triton#11584; so as of 3.9). A tie between two numbers of a float8 goes to the larger, and
a NaN becomes a number. Under the interpreter bfloat16 tiles are therefore widened to float32, which is exact, and
`round_to` rounds what is narrowed. Other dtypes go the same way in both.

It must be chosen before Python starts, with TRITON_INTERPRET=1: torch may import Triton early. Triton before 3.7 needs
numpy before 2.4 to interpret loops (triton#9171).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "round_to"]

# What `triton.jit` goes by, too: fixed when the kernels are imported.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round float32 to nearest even; under the interpreter bfloat16 comes back as float32, which stores exactly."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    if INTERPRETED and dtype == tl.float8e4nv:
        bits = _to_few_bits(x, 20, 512.0, 2.0**-6).to(dtype).to(tl.uint8, bitcast=True)
        return tl.where(x != x, 0x7F, bits).to(tl.uint8).to(dtype, bitcast=True)
    if INTERPRETED and dtype == tl.float8e5:
        return _to_few_bits(x, 21, 65536.0, 2.0**-14).to(dtype)
    return x.to(dtype)


@triton.jit
def _to_few_bits(x, num_dropped: tl.constexpr, steps: tl.constexpr, least_normal: tl.constexpr):
    """Round float32 to nearest even so that its last bits are zero, and what is less than normal to whole steps."""
    bits = x.to(tl.uint32, bitcast=True)
    half: tl.constexpr = (1 << (num_dropped - 1)) - 1
    kept = (bits + half + ((bits >> num_dropped) & 1)) & (0xFFFFFFFF << num_dropped & 0xFFFFFFFF)
    # A float32 of this size has no fraction left.
    whole = (x * steps + 12582912.0) - 12582912.0
    return tl.where(tl.abs(x) < least_normal, whole / steps, kept.to(tl.float32, bitcast=True))
