"""The number of threads of a decode step, measured once a machine.

A step of few rows reads all weights, so threads help until they have the memory's whole bandwidth. More than the
machine gives, as in a container with a quota or on the second threads of cores, make it slower. Prefill gains from each
core, so that among numbers which are about as fast the largest is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from reference_engine.fast.measurements import keep_times, kept_times

__all__ = ["ThreadCount", "choose_num_threads"]

VARIABLE = "OMP_NUM_THREADS"
NUM_WEIGHTS, WEIGHT_SHAPE = 8, (2048, 1024)
"""64 MB in float32: more than second caches hold, and read in a few milliseconds."""
NUM_ROUNDS = 7
MAX_LOAD = 0.5
"""Processes that want to run, a processor, above which nothing is measured."""
SLACK = 0.1
"""The ratio by which a larger number may be slower than the fastest."""


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of threads, and where it comes from."""

    num_threads: int
    source: str
    """`measured`, or in words."""
    milliseconds: Mapping[int, float]
    """Time to read the weights, by number of threads; empty if nothing was measured."""

    def __str__(self) -> str:
        """Return one line."""
        times = ", ".join(f"{number}: {time_ms:.2f} ms" for number, time_ms in self.milliseconds.items())
        return f"{self.num_threads}, {self.source}" + (f" ({times})" if times else "")


def choose_num_threads() -> ThreadCount:
    """Return what the variable OMP_NUM_THREADS says, else what was measured on this machine: now, if never before.

    A busy machine is not measured: the other work would choose, for good. Measuring takes a tenth of a second or so,
    and leaves torch's number of threads as it was.
    """
    if VARIABLE in os.environ:
        return ThreadCount(torch.get_num_threads(), VARIABLE, {})
    milliseconds = _kept()
    if not milliseconds:
        if _is_busy():
            return ThreadCount(torch.get_num_threads(), "torch's own number, the machine is too busy to measure", {})
        milliseconds = _measure(_candidates())
        keep_times("threads", _candidates(), {str(number): time_ms for number, time_ms in milliseconds.items()})
    return ThreadCount(_largest_fast(milliseconds), "measured", milliseconds)


def _kept() -> dict[int, float]:
    try:
        return {int(number): time_ms for number, time_ms in kept_times("threads", _candidates()).items()}
    except ValueError:
        return {}


def _is_busy() -> bool:
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > MAX_LOAD * max(_candidates())


def _candidates() -> list[int]:
    """Return the processors that this process may use, half of them and so on, and torch's own number."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    candidates = {torch.get_num_threads()}
    while number:
        candidates.add(number)
        number //= 2
    return sorted(candidates)


def _measure(candidates: Sequence[int]) -> dict[int, float]:
    """Return the least time of each number of threads, in turn, so that other work meets all of them."""
    before = torch.get_num_threads()
    weights = [torch.full(WEIGHT_SHAPE, 0.5) for _ in range(NUM_WEIGHTS)]
    x = torch.ones(1, WEIGHT_SHAPE[1])
    least = dict.fromkeys(candidates, float("inf"))
    try:
        for _ in range(NUM_ROUNDS):
            for number in candidates:
                torch.set_num_threads(number)
                linear(x, weights[0])  # wakes the threads
                start = time.perf_counter()
                for weight in weights:
                    linear(x, weight)
                least[number] = min(least[number], 1e3 * (time.perf_counter() - start))
    finally:
        torch.set_num_threads(before)
    return least


def _largest_fast(milliseconds: Mapping[int, float]) -> int:
    limit = (1 + SLACK) * min(milliseconds.values())
    return max(number for number, time_ms in milliseconds.items() if time_ms <= limit)
