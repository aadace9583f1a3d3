"""Memory snapshots in the schema of torch's CUDA allocator, which the public memory viewer reads, made of CPU events.

A snapshot holds what is alive at the end of the captured steps (`segments`) and what happened during them
(`device_traces`). The file is a pickle of protocol 4 with plain types only: the viewer reads no later one.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.profiling.memory.allocations import Allocation, PersistentBlock
from harness.results.profile import Frame, MemoryCategory

PICKLE_PROTOCOL = 4


def build_snapshot(
    allocations: Sequence[Allocation], held: Sequence[PersistentBlock], *, begin: float, end: float
) -> dict[str, Any]:
    """Build the snapshot of the time from `begin` to `end`, microseconds on the allocations' own clock."""
    builder = _Builder()
    blocks = [
        builder.block(block.address, block.num_bytes, block.category, (Frame(filename="", line=0, name=block.name),))
        for block in held
    ]
    blocks += [
        builder.block(allocation.address, allocation.num_bytes, allocation.category, allocation.frames)
        for allocation in allocations
        if allocation.is_alive(end)
    ]
    events = sorted(builder.events(allocations, begin, end), key=lambda event: event[0])
    return {
        "segments": [_segment(block) for block in sorted(blocks, key=lambda block: int(block["address"]))],
        "device_traces": [[event for _, event in events]],
    }


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot."""
    path.write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))


class _Builder:
    """Makes plain data; equal stacks are one object, which a pickle holds once."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def events(
        self, allocations: Iterable[Allocation], begin: float, end: float
    ) -> Iterator[tuple[tuple[float, int], dict[str, Any]]]:
        """Yield what happened, with what it is to be sorted by."""
        for allocation in allocations:
            at, freed_at = allocation.time_us, allocation.freed_us
            if begin <= at <= end:
                yield (at, 0), self._event("alloc", allocation, at, allocation.frames)
            if freed_at is not None and begin <= freed_at <= end:
                for order, action in enumerate(("free_requested", "free_completed"), 1):
                    yield (freed_at, order), self._event(action, allocation, freed_at, allocation.freed_frames)

    def block(
        self, address: int, num_bytes: int, category: MemoryCategory, frames: tuple[Frame, ...]
    ) -> dict[str, Any]:
        return {
            "address": address,
            "size": num_bytes,
            "requested_size": num_bytes,
            "state": "active_allocated",
            "frames": self._plain(frames),
            "category": category.value,
        }

    def _event(self, action: str, allocation: Allocation, time_us: float, frames: tuple[Frame, ...]) -> dict[str, Any]:
        return {
            "action": action,
            "addr": allocation.address,
            "size": allocation.num_bytes,
            "stream": 0,
            "time_us": int(time_us),
            "frames": self._plain(frames),
            "category": allocation.category.value,
        }

    def _plain(self, frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
        if frames not in self._stacks:
            self._stacks[frames] = [
                {"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in frames
            ]
        return self._stacks[frames]


def _segment(block: dict[str, Any]) -> dict[str, Any]:
    """Return a segment of one block: the CPU allocator asks the system for each."""
    size = block["size"]
    return {
        "device": 0,
        "address": block["address"],
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "blocks": [block],
    }
