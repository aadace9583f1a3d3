"""What was measured once on a machine, and is kept for the next process: times by the name of a way."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from reference_engine.fast.cpp_operators import cache_folder

__all__ = ["keep_times", "kept_times"]

QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
"""The file in which Linux gives a container's share of the processors."""


def kept_times(kind: str, parts: Iterable[object]) -> dict[str, float]:
    """Return the milliseconds that `keep_times` wrote; empty if there are none, or none that can be read.

    Args:
        kind: of measurement.
        parts: what it depends on besides the processor, torch and the container's share.
    """
    try:
        times = json.loads(_path(kind, parts).read_text(encoding="utf-8"))
        return {str(name): float(milliseconds) for name, milliseconds in times.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep_times(kind: str, parts: Iterable[object], milliseconds: Mapping[str, float]) -> None:
    """Write the times; where that is not allowed, the next process measures again."""
    path = _path(kind, parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(milliseconds) + "\n", encoding="utf-8")
    except OSError:
        return


def _path(kind: str, parts: Iterable[object]) -> Path:
    """Return a file named for what a measurement depends on."""
    machine: list[object] = [platform.machine(), torch.__version__, *parts]
    machine += [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    for quota in QUOTAS:
        machine += _lines(quota)
    return cache_folder() / f"{kind}-{hashlib.sha256(repr(machine).encode()).hexdigest()[:16]}.json"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
