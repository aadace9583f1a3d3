"""Memory in pages of 2 MB, where the system has them.

A step reads all weights, and each page is found through tables that lie in memory, too: with pages of 4 KB a tenth of a
step is spent on these (reports/cpu/engine.md). Nothing here changes a result, and where the system refuses, all stays
as it was.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["collapse_pages", "prefer_huge_pages"]

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Of Linux: use them when memory is first touched; exchange small ones for them now (since version 6.1)."""


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Let the memory of a tensor on the CPU be huge pages as it comes into use."""
    if tensor.device.type == "cpu":
        _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, MADV_HUGEPAGE)


def collapse_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Move what tensors on the CPU hold, packed or not, to huge pages; one page may hold the ends of two of them."""
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(_range(tensor) for tensor in tensors if tensor.device.type == "cpu"):
        if ranges and start - ranges[-1][1] < 2 * mmap.PAGESIZE:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    for start, stop in ranges:
        _advise(start, stop, MADV_COLLAPSE)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one after its last."""
    if not tensor.is_mkldnn:
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    mkldnn: Any = torch.ops.mkldnn
    start = mkldnn.data_ptr(tensor)
    return start, start + mkldnn._nbytes(tensor)


def _advise(start: int, stop: int, advice: int) -> None:
    """Advise the system on the pages of a range; that it refuses is no error."""
    start, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
    if sys.platform == "linux" and stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_int(advice))
