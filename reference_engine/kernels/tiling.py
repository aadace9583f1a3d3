"""How large the tiles of the attention kernels are: from the head's shape alone, so that no result depends on a batch.

The sizes follow from what a tile occupies, not from measurements: none have been made on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["MAX_HEAD_DIM", "Tiling", "find_tiling"]

MAX_HEAD_DIM = 256
# Matrix units take no side below 16 elements.
MIN_SIDE = 16
# One tile of K (V takes as much, and each again for every stage of the pipeline); of Q; in shared memory.
KEY_TILE_BYTES = 16 << 10
QUERY_TILE_BYTES = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sizes of a tile; all powers of two, and at least 16."""

    rows: int
    """Query rows of a prefill tile."""
    keys: int
    """Keys that are visited at once."""
    padded_head_dim: int
    num_warps: int
    """Of a prefill tile; decode's tiles are narrow and take 4."""
    num_stages: int = 2
    """Key tiles in flight."""


def find_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Return the tile sizes for heads of this shape."""
    padded = power_of_two(head_dim)
    row_bytes = padded * dtype.itemsize
    rows = _clamp(QUERY_TILE_BYTES // row_bytes, 128)
    return Tiling(
        rows=rows,
        keys=_clamp(KEY_TILE_BYTES // row_bytes, 64),
        padded_head_dim=padded,
        num_warps=8 if rows * padded >= 128 * 128 else 4,
    )


def power_of_two(size: int) -> int:
    """Return the smallest power of two that holds `size` and is at least 16."""
    return max(MIN_SIDE, 1 << (size - 1).bit_length())


def _clamp(size: int, maximum: int) -> int:
    return min(maximum, max(MIN_SIDE, size))
