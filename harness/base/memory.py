"""Memory that this process may still take, and that it gives back; a garbage collector that pauses or searches less.

The machine's memory counts within the limit of the container that it runs in.
"""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

MEMINFO = Path("/proc/meminfo")
_YOUNG_SEARCHES = 200
"""Searches of younger objects after which the garbage collector searches all; Python's default is 10."""
_OLDEST = 2
_MANY_OBJECTS = 500
"""Objects that a search finds where all are worth searching: imports leave up to 100."""
_MOST_KEPT_BYTES = 64 << 20
"""Free memory that the C library's allocator may keep for what comes next."""
_MALLINFO = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Files with the limit and use of a container, in cgroups version 2 and 1."""


def available_bytes() -> int:
    """Return the bytes available without swapping; all of the machine's if the system does not say."""
    limits = [_machine_bytes()]
    for limit, used in CONTROL_GROUPS:
        try:
            limits.append(max(0, int(limit.read_text()) - int(used.read_text())))
        except (OSError, ValueError):  # no such group, or one without a limit
            continue
    return min(limits)


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Yield a list that is given this process's memory beside mapped files, in bytes, every 20 ms; empty elsewhere."""
    seen, is_over = list[int](), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            seen.extend(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

    thread = threading.Thread(target=watch, daemon=True)
    if Path("/proc/self/status").exists():
        thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()


def give_back() -> None:
    """Give memory back to the system that glibc's allocator keeps free, if it is much.

    It keeps what lies between blocks in use, of tensors up to 32 MB: more than there is in use, where tensors of many
    sizes come and go.
    """
    libc = _glibc()
    if libc is not None and libc.mallinfo2().fordblks > _MOST_KEPT_BYTES:
        libc.malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    """What glibc says of its allocator: `fordblks` is the memory that it keeps free."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


@cache
def _glibc() -> Any:
    """Return the C library of this process; None if it has no allocator of glibc's, since 2.33."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallinfo2"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    return libc


def _machine_bytes() -> int:
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Pause Python's garbage collector, which searches millions of new objects in vain: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_rarely() -> None:
    """Have Python's garbage collector search all objects rarely, until such a search finds something.

    A search of all that torch and transformers import takes 0.2 s and finds nothing, and a check of a tiny model had
    seven. Young objects, among them the cycles that hold tensors, are searched as often as before. What makes many
    engines leaves older ones in cycles.
    """
    thresholds = young, middle, _ = gc.get_threshold()

    def search_more(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == _OLDEST and info["collected"] > _MANY_OBJECTS:
            gc.callbacks.remove(search_more)
            gc.set_threshold(*thresholds)

    gc.callbacks.append(search_more)
    gc.set_threshold(young, middle, _YOUNG_SEARCHES)
