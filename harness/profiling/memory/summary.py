"""Sum up a memory snapshot, or the memory events of a trace: what is in use, what was at the peak, what stayed.

Traces of any program carry `[memory]` events when torch's profiler ran with `profile_memory=True`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from harness.errors import Code, HarnessError
from harness.profiling.memory.snapshot_file import (
    ALLOC,
    FREE,
    IN_USE,
    AllocatorEvent,
    Block,
    DeviceSnapshot,
    read_snapshot,
)
from harness.profiling.memory.timeline import history_timeline, stack
from harness.profiling.trace.columns import Trace
from harness.profiling.trace.file import GZIP_MAGIC, read_trace
from harness.profiling.trace.phases import find_steps
from harness.profiling.trace.tables import MemoryEvent, memory_events
from harness.results.memory import (
    DeviceMemory,
    MemoryDiff,
    MemoryPlace,
    MemorySummary,
    OutOfMemory,
    PlaceChange,
    StepGrowth,
)
from harness.results.profile import Frame, MemoryTimeline


def is_trace(path: Path) -> bool:
    """Whether a file is JSON or gzipped, as traces are and pickled snapshots are not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith((GZIP_MAGIC, b"{", b"["))


def read_trace_memory(path: Path) -> Iterator[tuple[DeviceSnapshot, tuple[StepGrowth, ...]]]:
    """Yield for each device of a trace a snapshot, and its growth over the steps.

    Raises:
        HarnessError: those of a trace; SNAPSHOT_UNREADABLE: it has no events of memory.
    """
    trace = read_trace(path)
    events = memory_events(trace)
    if not events:
        what = "the trace holds no memory events"
        raise HarnessError(Code.SNAPSHOT_UNREADABLE, what, where=path, hint="record it with profile_memory=True")
    for device in sorted({event.device for event in events}):
        device_events = [event for event in events if event.device == device]
        yield _snapshot(device, device_events), tuple(_growth(trace, device_events))


def _snapshot(device: int, events: Sequence[MemoryEvent]) -> DeviceSnapshot:
    """Return the events as an allocator's history, and what they leave allocated."""
    history = [
        AllocatorEvent(
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
    left: dict[int, AllocatorEvent] = {}
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
    kept: dict[int, MemoryEvent] = {}
    for item in events:
        if item.num_bytes > 0:
            kept[item.address] = item
        else:
            kept.pop(item.address, None)
    in_use = np.cumsum([0, *(item.num_bytes for item in events)])
    ends: dict[str, list[float]] = {}
    for step in find_steps(trace):
        ends.setdefault(step.phase, []).append(float(trace.end_ns[step.event]) / 1e3)
    for phase, step_ends in ends.items():
        after = in_use[np.searchsorted(times, step_ends, side="right")]
        between = (
            Block(item.address, item.num_bytes, item.num_bytes, IN_USE, stack(item), None)
            for item in kept.values()
            if step_ends[0] < item.time_us <= step_ends[-1]
        )
        yield StepGrowth(
            phase=phase,
            num_steps=len(step_ends),
            first_bytes=int(after[0]),
            last_bytes=int(after[-1]),
            kept=_places(between)[:1],
        )


_AWAITING = ("active_awaiting_free", "active_pending_free")
_CHANGES = {ALLOC: 1, FREE: -1}
"""Events that change what is in use, and their sign."""
_OF_TORCH = re.compile(r"(^|[/\\])torch[/\\]")
_OPERATOR = re.compile(r"wrapper_[A-Z]+_|at::_ops::|Backward\d*::apply")
"""Of an operator in C++: threads of the backward pass have no frame of Python."""
UNKNOWN = "no stack was recorded"


_Piece = Block | AllocatorEvent
"""What is in use: as it is now, or by the event that allocated it."""


def summarize_memory(path: Path) -> MemorySummary:
    """Sum up a snapshot, or the memory events of a trace.

    Raises:
        HarnessError: SNAPSHOT_UNREADABLE, and those of a trace.
    """
    return _summary(path, read_memory(path))


def summarize_with_timelines(path: Path) -> tuple[MemorySummary, tuple[MemoryTimeline | None, ...]]:
    """Return the summary and the timeline of each device; None where it has no history."""
    read = read_memory(path)
    return _summary(path, read), tuple(history_timeline(snapshot) for snapshot, _ in read)


def read_memory(path: Path) -> list[tuple[DeviceSnapshot, tuple[StepGrowth, ...]]]:
    """Return each device of a snapshot or trace, and its growth over the steps.

    Raises:
        HarnessError: SNAPSHOT_UNREADABLE, and those of a trace.
    """
    return list(read_trace_memory(path)) if is_trace(path) else [(item, ()) for item in read_snapshot(path)]


def _summary(path: Path, read: Iterable[tuple[DeviceSnapshot, tuple[StepGrowth, ...]]]) -> MemorySummary:
    devices = tuple(replace(_device(snapshot), growth=growth) for snapshot, growth in read)
    return MemorySummary(file=str(path), devices=devices)


def diff_memory(before: Path, after: Path) -> MemoryDiff:
    """Compare two snapshots.

    Raises:
        HarnessError: SNAPSHOT_UNREADABLE.
    """
    old, new = summarize_memory(before), summarize_memory(after)
    return MemoryDiff(before=old, after=new, now=_changes(old, new, "now"), at_peak=_changes(old, new, "at_peak"))


def _device(snapshot: DeviceSnapshot) -> DeviceMemory:
    used: dict[int, _Piece] = {block.address: block for block in snapshot.blocks if block.state == IN_USE}
    history = _History(snapshot.events, used)
    free = [block for block in snapshot.blocks if block.state == "inactive"]
    return DeviceMemory(
        device=snapshot.device,
        reserved_bytes=sum(snapshot.segment_bytes),
        allocated_bytes=sum(piece.num_bytes for piece in used.values()),
        awaiting_free_bytes=sum(block.num_bytes for block in snapshot.blocks if block.state in _AWAITING),
        requested_bytes=sum(block.requested_bytes for block in snapshot.blocks if block.state == IN_USE),
        largest_free_bytes=max((block.num_bytes for block in free if not block.is_private), default=0),
        private_free_bytes=sum(block.num_bytes for block in free if block.is_private),
        num_segments=len(snapshot.segment_bytes),
        num_events=len(snapshot.events),
        peak_bytes=history.peak_bytes if snapshot.events else None,
        peak_after_us=history.peak_after_us,
        now=_places(used.values()),
        at_peak=_places(history.at_peak),
        kept=_places(history.kept),
        out_of_memory=tuple(_refused(event) for event in snapshot.events if event.action == "oom"),
        settings=snapshot.settings,
        contradictions=tuple(
            history.contradictions({block.address for block in snapshot.blocks if block.state in _AWAITING})
        ),
    )


class _History:
    """What was in use while the events happened; without events, what is in use now."""

    def __init__(self, events: Sequence[AllocatorEvent], used: Mapping[int, _Piece]) -> None:
        """Walk through the events.

        Events are in order; a ring of them may have lost its beginning, never its end. `used` is what is in use after
        them, by address.
        """
        self._events = [event for event in events if event.action in _CHANGES]
        self._used, self._times = used, [event.time_us for event in events]
        self._before = self._in_use_before(used)
        highest, peak_us = 0, events[0].time_us if events else 0.0
        total = self.peak_bytes = sum(piece.num_bytes for piece in self._before.values())
        for count, event in enumerate(self._events, start=1):
            total += event.num_bytes * _CHANGES[event.action]
            if total > self.peak_bytes:
                self.peak_bytes, peak_us, highest = total, event.time_us, count
        has_times = any(self._times)  # older versions of torch note none
        self.peak_after_us = peak_us - self._times[0] if has_times else None
        self.at_peak = list(self._in_use_after(highest).values())
        latest = {event.address: event.action for event in self._events}
        self.kept = [piece for address, piece in used.items() if latest.get(address) == ALLOC]

    def contradictions(self, awaiting: Collection[int]) -> Iterator[str]:
        """Yield what in the history cannot be, so that its peak may be wrong; `awaiting` a free, blocks are in use."""
        in_use = dict(self._before)
        num_twice = num_unequal = num_unknown = 0
        for event in self._events:
            piece = in_use.pop(event.address, None)
            if event.action == ALLOC:
                num_twice += piece is not None
                in_use[event.address] = event
            else:
                num_unknown += piece is None
                num_unequal += piece is not None and piece.num_bytes != event.num_bytes
        num_back = sum(after < before for before, after in pairwise(self._times))
        num_ends = len((in_use.keys() ^ self._used.keys()) - set(awaiting)) if self._events else 0
        yield from (
            f"{number:,} {what}"
            for number, what in (
                (num_twice, "allocations at an address that was in use"),
                (num_unknown, "frees of an address that was not in use"),
                (num_unequal, "frees of another size than was allocated"),
                (num_back, "events before the one ahead of them"),
                (num_ends, "blocks that are in use at the end of the history or in the segments, and not in both"),
            )
            if number
        )

    def _in_use_before(self, used: Mapping[int, _Piece]) -> dict[int, _Piece]:
        """Return what was in use before the events: what they free first, and what they leave alone."""
        first: dict[int, AllocatorEvent] = {}
        for event in self._events:
            first.setdefault(event.address, event)
        untouched = {address: piece for address, piece in used.items() if address not in first}
        freed = {at: event for at, event in first.items() if event.action == FREE}
        return untouched | {at: replace(event, frames=()) for at, event in freed.items()}

    def _in_use_after(self, count: int) -> dict[int, _Piece]:
        """Return what was in use after so many events."""
        in_use = dict(self._before)
        for event in self._events[:count]:
            if event.action == FREE:
                in_use.pop(event.address, None)
            else:
                in_use[event.address] = event
        return in_use


def _places(pieces: Iterable[_Piece]) -> tuple[MemoryPlace, ...]:
    groups: dict[tuple[str, str | None, str | None], list[int]] = defaultdict(list)
    for piece in pieces:
        groups[_place(piece.frames), _operation(piece.frames), piece.category].append(piece.num_bytes)
    places = [
        MemoryPlace(place=place, operation=operation, category=category, num_bytes=sum(sizes), num_blocks=len(sizes))
        for (place, operation, category), sizes in groups.items()
    ]
    return tuple(sorted(places, key=lambda item: (-item.num_bytes, item.place)))


def _place(frames: Sequence[Frame]) -> str:
    """Return the innermost line of Python outside of torch; or the innermost operator; or the innermost frame."""
    python = (frame for frame in frames if frame.filename.endswith(".py"))
    outside_torch = next((frame for frame in python if not _OF_TORCH.search(frame.filename)), None)
    native = (frame for frame in frames if _OPERATOR.search(frame.name))
    frame = outside_torch or next(native, None) or next(iter(frames), None)
    if frame is None:
        return UNKNOWN
    return f"{frame.filename}:{frame.line} {frame.name}" if frame.filename else frame.name


def _operation(frames: Sequence[Frame]) -> str | None:
    """Return the innermost named operation or module: a frame without a file, in others, that torch has not called."""
    bare = (frame.name for frame in frames[:-1] if not frame.filename)
    named = (name for name in bare if "::" not in name and not name.startswith("<built-in"))
    return next(named, None)


def _refused(event: AllocatorEvent) -> OutOfMemory:
    return OutOfMemory(
        requested_bytes=event.num_bytes, device_free_bytes=event.device_free_bytes, place=_place(event.frames)
    )


def _changes(before: MemorySummary, after: MemorySummary, when: str) -> tuple[PlaceChange, ...]:
    old, new = (_by_place(summary, when) for summary in (before, after))
    changes = [
        PlaceChange(
            device=device,
            place=place,
            before_bytes=old.get((device, place), 0),
            after_bytes=new.get((device, place), 0),
        )
        for device, place in old.keys() | new.keys()
    ]
    changed = (change for change in changes if change.added_bytes)
    return tuple(sorted(changed, key=lambda change: (-abs(change.added_bytes), change.place)))


def _by_place(summary: MemorySummary, when: str) -> dict[tuple[int, str], int]:
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for device in summary.devices:
        for item in getattr(device, when):
            sums[device.device, item.place] += item.num_bytes
    return sums
