"""Memory that this process may still take: the machine's, within the limit of the container it runs in."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Limit and use as a container sees its own, in versions 2 and 1."""


def available_bytes() -> int:
    """Return the bytes that can be taken without swapping; 0 if the system does not tell (not Linux)."""
    limits = [_machine_bytes()]
    for limit, used in CONTROL_GROUPS:
        limit_bytes, used_bytes = _number(limit), _number(used)
        if limit_bytes is not None and used_bytes is not None:
            limits.append(max(0, limit_bytes - used_bytes))
    return min(limits)


def _machine_bytes() -> int:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it says `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
