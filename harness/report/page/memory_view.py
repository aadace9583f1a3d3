"""The page's view of memory: for each device a timeline by category with its stacks, and what holds how much."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from harness.errors import printable
from harness.report.memory import device_lines, device_name, place_row, places_by_title
from harness.report.page.plot import Line, Plot, Scale, Tick, linear_scale, polyline
from harness.results.memory import MemoryPlace, MemorySummary
from harness.results.profile import Frame, MemoryCategory, MemoryPoint, MemoryTimeline

_CATEGORIES = tuple(MemoryCategory)
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MAX_FRAMES = 24
"""Innermost frames of a stack that are shown."""
_MOVING_SHARE = 0.6
"""The least share of the plot's height for memory that changes; the axis cuts off memory that never does."""


def memory_plot(timeline: MemoryTimeline) -> dict[str, Any] | None:
    """Return the plot of a phase's memory, and what a pointer over it shows; None if nothing was recorded.

    `floor` is the beginning of the axis, if it is not zero. `data` is for the script: `points` [x %, y %, microseconds,
    bytes, index of the stack], `stacks`, `frames`.
    """
    if not timeline.points:
        return None
    points = timeline.points
    x = linear_scale([point.time_us for point in points])
    y = _height(points)
    used = [index for index in range(len(_CATEGORIES)) if any(point.by_category[index] for point in points)]
    areas = _areas(points, used, x, y) if not y.low else _levels(points, used, x, y)
    peak = timeline.peak or max(points, key=lambda point: point.allocated_bytes)
    stacks = [[_frame(frame) for frame in stack[:_MAX_FRAMES]] for stack in timeline.stacks]
    return {
        "plot": Plot(
            x_ticks=x.ticks(lambda value: f"{value / 1e3:g}"),
            y_ticks=_byte_ticks(y),
            x_label="ms",
            y_label="allocated",
            lines=(*areas, Line(path=_steps(points, x, y, None), style="total")),
        ),
        "categories": tuple((_CATEGORIES[index].value, num_bytes(peak.by_category[index])) for index in used),
        "peak": f"{num_bytes(peak.allocated_bytes)} after {peak.time_us / 1e3:.2f} ms",
        "floor": num_bytes(y.low) if y.low else None,
        "peak_stack": tuple(stacks[peak.stack]) if peak.stack is not None else (),
        "data": _data(points, stacks, x, y),
    }


def num_bytes(value: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:g} B"


def _byte_ticks(y: Scale) -> tuple[Tick, ...]:
    """Return ticks that are round in the unit that suits the axis."""
    name, size = next((unit for unit in _UNITS if y.high >= unit[1]), ("B", 1))
    return Scale(y.low / size, y.high / size).ticks(lambda value: f"{value:g} {name}", max_ticks=5)


def _height(points: Sequence[MemoryPoint]) -> Scale:
    """Return the axis of bytes; it begins above zero where most is weights that never move."""
    low = min(point.allocated_bytes for point in points)
    high = max(point.allocated_bytes for point in points)
    if high - low >= _MOVING_SHARE * high or high == low:
        return linear_scale([high * 1.04])
    floor = max(0.0, low - (high - low) * (1 / _MOVING_SHARE - 1))
    return Scale(floor, high + 0.04 * (high - floor))


def _areas(points: Sequence[MemoryPoint], used: Sequence[int], x: Scale, y: Scale) -> tuple[Line, ...]:
    """Return an area per category, each from the ground, the tallest first so that the lower ones lie on it."""
    return tuple(
        Line(
            path=f"{_steps(points, x, y, index)}L{x.at(points[-1].time_us):g},100L{x.at(points[0].time_us):g},100Z",
            style=f"area {_CATEGORIES[index].value}",
            title=_CATEGORIES[index].value,
        )
        for index in reversed(used)
    )


def _levels(points: Sequence[MemoryPoint], used: Sequence[int], x: Scale, y: Scale) -> tuple[Line, ...]:
    """Return a line per category where the axis begins above zero: an area would show a wrong share."""
    return tuple(
        Line(
            path=_steps(points, x, y, index),
            style=f"level {_CATEGORIES[index].value}",
            title=f"up to {_CATEGORIES[index].value}",
        )
        for index in reversed(used)
        if max(sum(point.by_category[: index + 1]) for point in points) > y.low
    )


def _steps(points: Sequence[MemoryPoint], x: Scale, y: Scale, upto: int | None) -> str:
    """Return the path of the sum of the categories up to one of them; memory stays as it is until it changes."""
    corners: list[tuple[float, float]] = []
    for point in points:
        total = point.allocated_bytes if upto is None else list(accumulate(point.by_category))[upto]
        at, height = x.at(point.time_us), y.at(total)
        if corners:
            corners.append((at, corners[-1][1]))
        corners.append((at, height))
    return polyline(corners)


def _data(points: Sequence[MemoryPoint], stacks: Sequence[Sequence[str]], x: Scale, y: Scale) -> dict[str, Any]:
    frames: dict[str, int] = {}
    numbered = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in stacks]
    return {
        "points": [
            [x.at(p.time_us), y.at(p.allocated_bytes), round(p.time_us, 1), num_bytes(p.allocated_bytes), p.stack]
            for p in points
        ],
        "stacks": numbered,
        "frames": list(frames),
    }


def _frame(frame: Frame) -> str:
    place = f"  {frame.filename}:{frame.line}" if frame.filename else ""
    return printable(f"{frame.name}{place}")


_MOST_ROWS = 100


def device_views(summary: MemorySummary, timelines: Sequence[MemoryTimeline | None]) -> Iterator[dict[str, Any]]:
    """Yield the view of each device of a file."""
    for device, timeline in zip(summary.devices, timelines, strict=True):
        yield {
            "title": printable(f"{summary.file}, {device_name(device)}"),
            "lines": [printable(line) for line in device_lines(device)],
            "memory": memory_plot(timeline) if timeline else None,
            "tables": [(title, _rows(places)) for title, places in places_by_title(device).items()],
        }


def _rows(places: Sequence[MemoryPlace]) -> list[list[str]]:
    return [[printable(cell) for cell in place_row(place)] for place in places[:_MOST_ROWS]]
