"""Memory over the captured steps, and its peak: allocations paired with their frees, each with its purpose."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from harness.profiling.memory.snapshot_file import ALLOC, FREE, IN_USE, AllocatorEvent, Block, DeviceSnapshot
from harness.profiling.trace.tables import MemoryEvent, Node
from harness.results.profile import Frame, MemoryCategory, MemoryPoint, MemoryTimeline

MAX_FRAMES = 32
"""Innermost frames of a stack that are kept."""


@dataclass(slots=True, kw_only=True, eq=False)
class Allocation:
    """One block from its allocation to its free. Times in microseconds."""

    time_us: float
    address: int
    num_bytes: int
    frames: tuple[Frame, ...]
    """Innermost first."""
    within: Node | None = None
    """The operation's span it was allocated in."""
    freed_us: float | None = None
    freed_frames: tuple[Frame, ...] = ()
    freed_within: Node | None = None
    category: MemoryCategory = MemoryCategory.OTHER

    def is_alive(self, time_us: float) -> bool:
        """Whether the block exists at that time."""
        return self.time_us <= time_us and (self.freed_us is None or self.freed_us > time_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentBlock:
    """A block that was there before the capture began, and stays."""

    address: int
    num_bytes: int
    category: MemoryCategory
    name: str
    """The parameter, or what else it is."""


def match(
    events: Iterable[MemoryEvent], *, names: Collection[str], frames: Callable[[MemoryEvent], tuple[Frame, ...]]
) -> list[Allocation]:
    """Pair each allocation with the free of its address that follows.

    Events are in order of time. The spans of the operations `names` tell what is temporary; `frames` returns the stack
    that an event has happened in.
    """
    allocations: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    for event in events:
        span = _span(event, names)
        if event.num_bytes > 0:
            allocation = Allocation(
                time_us=event.time_us,
                address=event.address,
                num_bytes=event.num_bytes,
                frames=frames(event),
                within=span,
            )
            alive[event.address] = allocation
            allocations.append(allocation)
        elif (freed := alive.pop(event.address, None)) is not None:
            freed.freed_us, freed.freed_within, freed.freed_frames = event.time_us, span, frames(event)
    return allocations


def categorize(allocations: Iterable[Allocation], kv_storages: Mapping[float, Collection[int]]) -> None:
    """Set the category of each block.

    `kv_storages` has for the end of each step its time and the addresses that K and V are kept at then.
    """
    for allocation in allocations:
        if any(
            allocation.address in addresses and allocation.is_alive(time_us)
            for time_us, addresses in kv_storages.items()
        ):
            allocation.category = MemoryCategory.KV_CACHE
        elif allocation.within is None:
            allocation.category = MemoryCategory.OTHER
        elif allocation.within is allocation.freed_within:
            allocation.category = MemoryCategory.TEMPORARY
        else:
            allocation.category = MemoryCategory.ACTIVATIONS


def stack(event: MemoryEvent) -> tuple[Frame, ...]:
    """Return an event's stack, the innermost frame first: operators, operations and Python functions mixed."""
    around = () if event.within is None else event.within.around(event.time_us)
    return tuple(_frame(node) for node in islice(around, MAX_FRAMES))


def _frame(node: Node) -> Frame:
    """Take `torch/nn/functional.py(1693): relu` apart; an operator or an operation has no file."""
    place, colon, name = node.name.partition("): ")
    filename, parenthesis, line = place.rpartition("(")
    if node.category != "python_function" or not (colon and parenthesis and line.isdecimal()):
        return Frame(filename="", line=0, name=node.name)
    return Frame(filename=filename, line=int(line), name=name)


def _span(event: MemoryEvent, names: Collection[str]) -> Node | None:
    around = () if event.within is None else event.within.around(event.time_us)
    return next((node for node in around if node.name in names), None)


MAX_POINTS = 2000
_CATEGORIES = tuple(MemoryCategory)


def build_timeline(
    allocations: Sequence[Allocation],
    held: Sequence[PersistentBlock],
    *,
    begin: float,
    end: float,
    max_points: int = MAX_POINTS,
) -> MemoryTimeline:
    """Add up allocations and frees from `begin` to `end` on top of what was there before.

    Times are microseconds on the clock of the allocations, of which some lie before `begin`; `held` blocks exist all
    the time. Of longer timelines than `max_points`, each stretch keeps its highest and its last point.
    """
    stacks: dict[tuple[Frame, ...], int] = {}
    points = list(_points(allocations, held, begin, end, stacks))
    captured = [allocation for allocation in allocations if begin <= allocation.time_us <= end]
    num_frees = sum(allocation.freed_us is not None for allocation in captured)
    return MemoryTimeline(
        points=tuple(_thinned(points, max_points)),
        stacks=tuple(stacks),
        peak=max(points, key=lambda point: point.allocated_bytes, default=None),
        num_allocations=len(captured),
        num_frees=num_frees,
        num_kept=len(captured) - num_frees,
    )


def _points(
    allocations: Sequence[Allocation],
    held: Sequence[PersistentBlock],
    begin: float,
    end: float,
    stacks: dict[tuple[Frame, ...], int],
) -> Iterator[MemoryPoint]:
    current = dict.fromkeys(_CATEGORIES, 0)
    for block in held:
        current[block.category] += block.num_bytes
    changes: list[tuple[float, int, MemoryCategory, tuple[Frame, ...]]] = []
    for allocation in allocations:
        changes.append((allocation.time_us, allocation.num_bytes, allocation.category, allocation.frames))
        if allocation.freed_us is not None:
            changes.append((allocation.freed_us, -allocation.num_bytes, allocation.category, allocation.freed_frames))
    changes.sort(key=lambda change: change[0])
    has_begun = False
    for time_us, num_bytes, category, frames in changes:
        if time_us > end:
            break
        if time_us >= begin and not has_begun:
            has_begun = True
            yield _point(0.0, current, None)
        current[category] += num_bytes
        if time_us >= begin:
            yield _point(time_us - begin, current, stacks.setdefault(frames, len(stacks)))
    if not has_begun:
        yield _point(0.0, current, None)


def _point(time_us: float, current: dict[MemoryCategory, int], stack: int | None) -> MemoryPoint:
    return MemoryPoint(
        time_us=time_us,
        allocated_bytes=sum(current.values()),
        by_category=tuple(current[category] for category in _CATEGORIES),
        stack=stack,
    )


def _thinned(points: Sequence[MemoryPoint], max_points: int) -> Iterator[MemoryPoint]:
    if len(points) <= max_points:
        yield from points
        return
    stretch = -(-2 * len(points) // max_points)
    for at in range(0, len(points), stretch):
        stretch_points = points[at : at + stretch]
        highest = max(range(len(stretch_points)), key=lambda index: stretch_points[index].allocated_bytes)
        yield stretch_points[highest]
        if highest < len(stretch_points) - 1:
            yield stretch_points[-1]


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


def _of_events(events: list[AllocatorEvent]) -> Iterator[Allocation]:
    """Yield the allocations of a history, those first whose free it begins with. Their stacks are not known."""
    latest: dict[int, Allocation] = {}
    allocations: list[Allocation] = []
    for event in events:
        before = latest.get(event.address)
        if event.action == FREE and before is None:
            before = latest[event.address] = _allocation(event, EARLIER_US)
            yield before
        if before is not None and before.freed_us is None:  # an allocation also ends the block at its address
            before.freed_us, before.freed_frames = event.time_us, event.frames
        if event.action == ALLOC:
            latest[event.address] = _allocation(event, event.time_us)
            allocations.append(latest[event.address])
    yield from allocations


def _allocation(of: Block | AllocatorEvent, time_us: float) -> Allocation:
    category = next((item for item in MemoryCategory if item == of.category), MemoryCategory.OTHER)
    return Allocation(
        time_us=time_us,
        address=of.address,
        num_bytes=of.num_bytes,
        frames=of.frames if isinstance(of, Block) or of.action == ALLOC else (),
        category=category,
    )
