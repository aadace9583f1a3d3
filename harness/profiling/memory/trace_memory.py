"""The memory of any program's trace: the `[memory]` events of torch's profiler (`profile_memory=True`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from harness.errors import Code, HarnessError
from harness.profiling.memory.allocations import stack
from harness.profiling.memory.snapshot_file import ALLOC, FREE, IN_USE, Block, DeviceSnapshot, Event
from harness.profiling.trace.file import GZIP_MAGIC, Trace, read_trace
from harness.profiling.trace.nodes import MemoryEvent, memory_events
from harness.profiling.trace.summary import phase_spans
from harness.results.memory import StepGrowth


def is_trace(path: Path) -> bool:
    """Whether a file is JSON or gzipped, as traces are and pickled snapshots are not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith((GZIP_MAGIC, b"{", b"["))


def read_trace_memory(path: Path) -> Iterator[tuple[DeviceSnapshot, tuple[StepGrowth, ...]]]:
    """Yield what the trace tells of each device, as a snapshot, and how that grows over the steps.

    Raises:
        HarnessError: those of a trace; SNAPSHOT_UNREADABLE: it has no events of memory.
    """
    trace = read_trace(path)
    events = memory_events(trace)
    if not events:
        what = "the trace holds no memory events"
        raise HarnessError(Code.SNAPSHOT_UNREADABLE, what, where=path, hint="record it with profile_memory=True")
    for device in sorted({event.device for event in events}):
        own = [event for event in events if event.device == device]
        yield _snapshot(device, own), tuple(_growth(trace, own))


def _snapshot(device: int, events: Sequence[MemoryEvent]) -> DeviceSnapshot:
    """Return the events as an allocator's history, and what they leave allocated."""
    history = [
        Event(
            action=ALLOC if item.num_bytes > 0 else FREE,
            address=item.address,
            num_bytes=abs(item.num_bytes),
            time_us=item.time_us,
            frames=stack(item),
            category=None,
            device_free_bytes=None,
        )
        for item in events
    ]
    left: dict[int, Event] = {}
    for event in history:
        if event.action == ALLOC:
            left[event.address] = event
        else:
            left.pop(event.address, None)
    blocks = [Block(item.address, item.num_bytes, item.num_bytes, IN_USE, item.frames, None) for item in left.values()]
    return DeviceSnapshot(device=device, segment_bytes=(), blocks=tuple(blocks), events=tuple(history))


def _growth(trace: Trace, events: Sequence[MemoryEvent]) -> Iterator[StepGrowth]:
    """Yield for each phase what is in use after its first and its last step."""
    times = np.array([item.time_us for item in events])
    in_use = np.cumsum([0, *(item.num_bytes for item in events)])
    ends: dict[str, list[float]] = {}
    for event, phase in phase_spans(trace):
        ends.setdefault(phase, []).append(float(trace.end_ns[event]) / 1e3)
    for phase, own in ends.items():
        after = in_use[np.searchsorted(times, own, side="right")]
        yield StepGrowth(phase=phase, num_steps=len(own), first_bytes=int(after[0]), last_bytes=int(after[-1]))
