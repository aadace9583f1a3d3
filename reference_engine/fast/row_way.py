"""The way in which the C++ kernel multiplies a single row with a weight, measured once a machine and dtype.

A row takes as long as reading the weight, and what reads fastest differs: how many outputs are computed at once, each
a stream of its own, and whether the next ones are asked for. All ways give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reference_engine.fast.huge_pages import collapse_pages
from reference_engine.fast.measurements import keep_times, kept_times
from reference_engine.layers import Product

__all__ = ["RowWay", "with_row_way"]

NUM_BYTES, NUM_INPUTS, NUM_WEIGHTS = 64 << 20, 1024, 8
"""More than third caches hold, in products of some megabytes."""
NUM_ROUNDS = 9
"""In turn, so that other work meets all ways alike."""
LEAST_GAIN = 0.03
"""The ratio by which another way has to be faster than the kernel's own."""


@dataclass(frozen=True, slots=True)
class RowWay:
    """A way to multiply one row; see RowWay in kernels/cpu/products.h."""

    row_outputs: int = 2
    asks_ahead: bool = True

    def __str__(self) -> str:
        return f"{self.row_outputs} at once, {'asking ahead' if self.asks_ahead else 'not asking ahead'}"


WAYS = tuple(RowWay(outputs, asks) for outputs in (1, 2, 4, 8) for asks in (True, False))


def with_row_way(kernel: Any, dtype: torch.dtype) -> Product:
    """Return the kernel with the way that was measured to be the fastest on this machine: now, if never before.

    Measuring takes a tenth of a second or so. Of the least of several times, a busy machine's are longer by as much.
    """
    depends_on = (dtype, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    milliseconds = kept_times("row-way", depends_on)
    if milliseconds.keys() != {str(way) for way in WAYS}:
        milliseconds = _measure(kernel, dtype)
        keep_times("row-way", depends_on, milliseconds)
    way = _fastest(milliseconds)
    return partial(kernel, row_outputs=way.row_outputs, asks_ahead=way.asks_ahead)


def _fastest(milliseconds: Mapping[str, float]) -> RowWay:
    best, default = min(WAYS, key=lambda way: milliseconds[str(way)]), RowWay()
    return best if milliseconds[str(best)] <= (1 - LEAST_GAIN) * milliseconds[str(default)] else default


def _measure(kernel: Any, dtype: torch.dtype) -> dict[str, float]:
    """Return the least time of each way over all of some weights."""
    num_outputs = NUM_BYTES // (NUM_WEIGHTS * NUM_INPUTS * dtype.itemsize)
    weights = [torch.full((num_outputs, NUM_INPUTS), 0.5, dtype=dtype) for _ in range(NUM_WEIGHTS)]
    collapse_pages(weights)  # as the engine's own
    x, least = torch.ones(1, NUM_INPUTS, dtype=dtype), dict.fromkeys(map(str, WAYS), float("inf"))
    for _ in range(NUM_ROUNDS):
        for way in WAYS:
            begin = time.perf_counter()
            for weight in weights:
                kernel(x, weight, None, row_outputs=way.row_outputs, asks_ahead=way.asks_ahead)
            least[str(way)] = min(least[str(way)], 1e3 * (time.perf_counter() - begin))
    return least
