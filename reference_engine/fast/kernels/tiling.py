"""Tile sizes of the attention kernels: from the head's shape alone, so that no result depends on a batch.

Chosen so that compiled kernels keep everything in registers and take at most 96 KiB of shared memory (Triton 3.6, for
compute capability 8.0, 8.9, 9.0 and 12.0). On an H200 decode's tiling of heads of 128 is within a tenth of the best of
20 for 256 requests, and faster than that one for a single request (reports/h200/engine.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MAX_HEAD_DIM", "Tiling", "find_tiling", "power_of_two"]

MAX_HEAD_DIM = 256
# Matrix units take no side below 16 elements.
MIN_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sizes of a tile, all powers of two and at least 16, and the threads that work on it."""

    rows: int
    """Query rows of a prefill tile."""
    keys: int
    """Keys that are visited at once."""
    padded_head_dim: int
    num_warps: int
    """Of a prefill tile; decode's tiles have few rows and take 4."""


def find_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling for heads of this shape."""
    padded = power_of_two(head_dim)
    row_bytes = padded * dtype.itemsize
    # There are no matrix units for all bits of float32: its products are made of registers, which run out earlier.
    query_bytes = (16 if dtype == torch.float32 else 32) << 10
    return Tiling(
        rows=_clamp(query_bytes // row_bytes, 128),
        keys=_clamp(query_bytes // 2 // row_bytes, 64),
        padded_head_dim=padded,
        num_warps=8 if row_bytes >= 128 else 4,
    )


def power_of_two(size: int) -> int:
    """Return the smallest power of two that holds `size` and is a side that matrix units take."""
    return max(MIN_SIDE, 1 << (size - 1).bit_length())


def _clamp(size: int, maximum: int) -> int:
    return min(maximum, max(MIN_SIDE, size))
