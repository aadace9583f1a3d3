"""Memory over the captured steps, and its peak."""

from collections.abc import Iterator, Sequence

from harness.profiling.memory.allocations import Allocation, PersistentBlock
from harness.results.profile import Frame, MemoryCategory, MemoryPoint, MemoryTimeline

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

    Times are microseconds on the allocations' own clock, those before `begin` included; what is `held` is there all the
    time. Of longer timelines than `max_points`, each stretch keeps its highest and its last point.
    """
    stacks: dict[tuple[Frame, ...], int] = {}
    points = list(_points(allocations, held, begin, end, stacks))
    own = [allocation for allocation in allocations if begin <= allocation.time_us <= end]
    num_frees = sum(allocation.freed_us is not None for allocation in own)
    return MemoryTimeline(
        points=tuple(_thinned(points, max_points)),
        stacks=tuple(stacks),
        peak=max(points, key=lambda point: point.allocated_bytes, default=None),
        num_allocations=len(own),
        num_frees=num_frees,
        num_kept=len(own) - num_frees,
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
        own = points[at : at + stretch]
        highest = max(range(len(own)), key=lambda index: own[index].allocated_bytes)
        yield own[highest]
        if highest < len(own) - 1:
            yield own[-1]
