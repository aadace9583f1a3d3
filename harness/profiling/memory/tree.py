"""What lives at one moment of a memory history, as a tree of the calls that allocated it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.profiling.memory.snapshot_file import DeviceSnapshot
from harness.profiling.memory.summary import UNKNOWN, read_memory
from harness.profiling.memory.timeline import Allocation, read_history
from harness.results.memory import MemoryMoment, MemoryNode
from harness.results.profile import Frame

_MOST_CALLS = 100
"""Innermost frames of a block that are kept."""


def memory_at(path: Path, at_ms: float) -> tuple[MemoryMoment, ...]:
    """Return what each device of a snapshot, or of a trace with memory events, holds at a time.

    Args:
        path: of the file.
        at_ms: milliseconds after the first event of the device's history.

    Raises:
        HarnessError: SNAPSHOT_UNREADABLE; those of a trace; BAD_OPTION: no history, or one that ends before this time.
    """
    return tuple(_moment(snapshot, at_ms, path) for snapshot, _ in read_memory(path))


def _moment(snapshot: DeviceSnapshot, at_ms: float, path: Path) -> MemoryMoment:
    if not snapshot.events:
        hint = "torch.cuda.memory._record_memory_history() keeps one"
        raise HarnessError(Code.BAD_OPTION, f"{path} has no history", where="--at", actual=at_ms, hint=hint)
    begin_us, end_us = snapshot.events[0].time_us, snapshot.events[-1].time_us
    if not 0 <= at_ms <= (end_us - begin_us) / 1e3:
        expected = f"0 to {(end_us - begin_us) / 1e3:.3f}"
        raise HarnessError(
            Code.BAD_OPTION, "the history has no such time", where="--at", expected=expected, actual=at_ms
        )
    alive = [item for item in read_history(snapshot) if item.is_alive(begin_us + 1e3 * at_ms)]
    return MemoryMoment(device=snapshot.device, at_ms=at_ms, root=_tree(alive))


def _tree(alive: Iterable[Allocation]) -> MemoryNode:
    """Return the callers of all blocks, the outermost first."""
    root = MemoryNode(name="")
    for allocation in alive:
        node = root
        node.add(allocation.num_bytes)
        for name in _calls(allocation.frames):
            node = node.children.setdefault(name, MemoryNode(name=name))
            node.add(allocation.num_bytes)
    return root


def _calls(frames: Sequence[Frame]) -> list[str]:
    """Return the frames of a block by name, the outermost first."""
    kept = frames[:_MOST_CALLS][::-1]
    names = [f"{frame.filename}:{frame.line} {frame.name}" if frame.filename else frame.name for frame in kept]
    return names or [UNKNOWN]
