"""A device's snapshot as allocations: those of its history, and what was in use before it."""

from collections.abc import Iterator

from harness.profiling.memory.allocations import Allocation
from harness.profiling.memory.snapshot_file import ALLOC, FREE, IN_USE, Block, DeviceSnapshot, Event
from harness.profiling.memory.timeline import build_timeline
from harness.results.profile import MemoryCategory, MemoryTimeline

EARLIER_US = float("-inf")
"""When a block was allocated whose allocation the history does not show."""


def read_history(snapshot: DeviceSnapshot) -> list[Allocation]:
    """Return what was in use before the history, and then the allocations of the history, each with its free."""
    events = [event for event in snapshot.events if event.action in (ALLOC, FREE)]
    seen = {event.address for event in events}
    blocks = (block for block in snapshot.blocks if block.state == IN_USE and block.address not in seen)
    return [*(_allocation(block, EARLIER_US) for block in blocks), *_of_events(events)]


def history_timeline(snapshot: DeviceSnapshot) -> MemoryTimeline | None:
    """Return the memory over a snapshot's history; None where it has none."""
    if not snapshot.events:
        return None
    return build_timeline(read_history(snapshot), (), begin=snapshot.events[0].time_us, end=float("inf"))


def _of_events(events: list[Event]) -> Iterator[Allocation]:
    """Yield the allocations of a history, those first whose free it begins with. Their stacks are not known."""
    latest: dict[int, Allocation] = {}
    found: list[Allocation] = []
    for event in events:
        before = latest.get(event.address)
        if event.action == FREE and before is None:
            before = latest[event.address] = _allocation(event, EARLIER_US)
            yield before
        if before is not None and before.freed_us is None:  # an allocation too ends what is at its address
            before.freed_us, before.freed_frames = event.time_us, event.frames
        if event.action == ALLOC:
            latest[event.address] = _allocation(event, event.time_us)
            found.append(latest[event.address])
    yield from found


def _allocation(of: Block | Event, time_us: float) -> Allocation:
    own = next((item for item in MemoryCategory if item == of.category), MemoryCategory.OTHER)
    return Allocation(
        time_us=time_us,
        address=of.address,
        num_bytes=of.num_bytes,
        frames=of.frames if isinstance(of, Block) or of.action == ALLOC else (),
        category=own,
    )
