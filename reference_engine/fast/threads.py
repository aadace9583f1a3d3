"""The number of threads of a decode step, measured once a machine.

A step of few rows reads all weights, so threads help until they have the memory's whole bandwidth. More than the
machine gives, as in a container with a quota or on the second threads of cores, make it slower. Prefill gains from each
core, so that among numbers which are about as fast the largest is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

from reference_engine.fast.cpp_operators import cache_folder

__all__ = ["ThreadCount", "choose_num_threads"]

VARIABLE = "OMP_NUM_THREADS"
NUM_WEIGHTS, WEIGHT_SHAPE = 8, (2048, 1024)
"""64 MB in float32: more than second caches hold, and read in a few milliseconds."""
NUM_ROUNDS = 7
MAX_LOAD = 0.5
"""Processes that want to run, a processor, above which nothing is measured."""
QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
"""The file in which Linux gives a container's share of the processors."""
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
        times = ", ".join(f"{number}: {own:.2f} ms" for number, own in self.milliseconds.items())
        return f"{self.num_threads}, {self.source}" + (f" ({times})" if times else "")


def choose_num_threads() -> ThreadCount:
    """Return what the variable OMP_NUM_THREADS says, else what was measured on this machine: now, if never before.

    A busy machine is not measured: the other work would choose, for good. Measuring takes a tenth of a second or so,
    and leaves torch's number of threads as it was.
    """
    if VARIABLE in os.environ:
        return ThreadCount(torch.get_num_threads(), VARIABLE, {})
    kept = cache_folder() / f"threads-{_machine()}.json"
    milliseconds = _read(kept)
    if not milliseconds:
        if _is_busy():
            return ThreadCount(torch.get_num_threads(), "torch's own number, the machine is too busy to measure", {})
        milliseconds = _measure(_candidates())
        _keep(kept, milliseconds)
    return ThreadCount(_largest_fast(milliseconds), "measured", milliseconds)


def _is_busy() -> bool:
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > MAX_LOAD * max(_candidates())


def _candidates() -> list[int]:
    """Return the processors that this process may use, half of them and so on, and torch's own number."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {torch.get_num_threads()}
    while number:
        found.add(number)
        number //= 2
    return sorted(found)


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
    return max(number for number, own in milliseconds.items() if own <= limit)


def _machine() -> str:
    """Return a name for what the measurement depends on: the processor, and which part of it this process has."""
    parts: list[object] = [platform.machine(), _candidates(), torch.__version__]
    parts += [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    for quota in QUOTAS:
        parts += _lines(quota)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _read(path: Path) -> dict[int, float]:
    """Return what `_keep` wrote; empty if there is nothing, or nothing that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {int(number): float(own) for number, own in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(path: Path, milliseconds: Mapping[int, float]) -> None:
    """Write the file; where that is not allowed, the next process measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(milliseconds) + "\n", encoding="utf-8")
    except OSError:
        return
