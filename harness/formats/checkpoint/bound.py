"""The bound of the cache: above it the least recently used entries are evicted, and none that is in use.

An entry is what stands in a folder of the cache: a golden, weights of another form, projections, ... A process that
uses one has a shared lock on it, which ends with the process however that ends; eviction takes the only lock. What is
being written stands in a scratch folder, which is no entry yet. On a file system without locks nothing is evicted.
Parts of the cache that are links to elsewhere are neither counted nor evicted.
"""

import fcntl
import math
import os
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.files import scratch_folder
from harness.formats.checkpoint.cache import cache_dir, cache_limit

_FRESH_S = 60.0
"""Age below which an entry is not evicted: whoever made it, or looked for it, may not have its lock yet."""
_trimmed_ns: dict[str, int] = {}
"""By cache: when this process last trimmed it."""


class Hold:
    """Keeps an entry in the cache for as long as this object is there."""

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)


def hold(path: Path) -> Hold | None:
    """Hold a folder that is about to be read, and note that it was used; None for what is no entry of the cache.

    If something was put into the cache since this process last looked, the cache is trimmed.

    Raises:
        HarnessError: as `cache_dir`.
    """
    cache = os.path.realpath(cache_dir())
    if not path.is_dir() or str((entry := Path(os.path.realpath(path))).parent.parent) != cache:
        return None
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    held = Hold(descriptor)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
        if not os.path.samestat(os.fstat(descriptor), entry.stat()):  # it was evicted, and made again
            return hold(path)
        if max((file.stat().st_mtime_ns for file in entry.iterdir()), default=0) > _trimmed_ns.get(cache, 0):
            trim()
    return held


def trim() -> None:
    """Evict entries until the cache is within its bound, or all that is left is in use.

    Raises:
        HarnessError: as `cache_dir`.
    """
    cache = cache_dir()
    _trimmed_ns[os.path.realpath(cache)] = time.time_ns()
    with suppress(OSError):
        limit = _limit(cache)
        if shutil.disk_usage(cache).used <= limit:
            return
        entries = sorted(_entries(cache), key=lambda entry: entry.used_ns)
        excess = sum(entry.num_bytes for entry in entries) - limit
        for entry in entries:
            if excess > 0 and _evict(entry.path):
                excess -= entry.num_bytes


def _limit(cache: Path) -> float:
    """Return the bound in bytes: without one, half of the file system, so that other data keep a place."""
    limit = cache_limit()
    return shutil.disk_usage(cache).total / 2 if limit is None else limit


def cache_tables(cache: Path) -> dict[str, Any]:
    """Describe the cache: its bound, and of each folder in it the entries, bytes, entries in use and last uses."""
    entries = list(_entries(cache))
    parts = sorted({entry.path.parent for entry in entries})
    rows = [_part_row(part, [entry for entry in entries if entry.path.parent == part]) for part in parts]
    summary = {
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "limit_bytes": int(limit) if math.isfinite(limit := _limit(cache)) else None,
        "limit_from": "half of the file system" if cache_limit() is None else "HARNESS_CACHE_GB",
    }
    return {"schema_version": 1, "kind": "cache", "path": str(cache), "summary": summary, "parts": rows}


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    num_bytes: int
    used_ns: int
    """When it was last used: noted by `hold`, or, to the day, by the file system as a file is read."""


def _entries(cache: Path) -> Iterator[_Entry]:
    with suppress(OSError):
        for part in cache.iterdir():
            if part.is_dir() and not part.is_symlink():
                yield from filter(None, map(_entry, part.iterdir()))


def _entry(path: Path) -> _Entry | None:
    """Return the entry at a path; None if it is being written, a link, or gone."""
    with suppress(OSError):
        status = path.lstat()
        if path.name.startswith(".") or stat.S_ISLNK(status.st_mode):
            return None
        if not stat.S_ISDIR(status.st_mode):
            return _Entry(path, status.st_size, max(status.st_mtime_ns, status.st_atime_ns))
        return _Entry(path, _num_bytes(path), status.st_mtime_ns)
    return None


def _num_bytes(folder: str | Path) -> int:
    with os.scandir(folder) as items:
        return sum(
            _num_bytes(item.path) if item.is_dir(follow_symlinks=False) else item.stat(follow_symlinks=False).st_size
            for item in items
        )


def _part_row(part: Path, entries: list[_Entry]) -> dict[str, Any]:
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(pick(entry.used_ns for entry in entries) / 1e9))
                   for pick in (min, max))  # fmt: skip
    return {
        "folder": part.name,
        "num_entries": len(entries),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "in_use": sum(_is_used(entry.path) for entry in entries),
        "least_recently_used": first,
        "last_used": last,
    }


@contextmanager
def _alone(path: Path) -> Iterator[os.stat_result]:
    """Keep others from holding an entry, and yield its status.

    Raises:
        OSError: somebody holds it, or it is gone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_used(path: Path) -> bool:
    with suppress(OSError), _alone(path):
        return False
    return True


def _evict(path: Path) -> bool:
    """Remove an entry that nobody uses, by a rename first: no reader ever sees a part of it; return whether it went."""
    with suppress(OSError), scratch_folder(".evicted-", path.parent) as aside, _alone(path) as status:
        if time.time_ns() - status.st_mtime_ns > _FRESH_S * 1e9 and os.path.samestat(status, path.lstat()):
            path.rename(aside / "entry")
            return True
    return False
