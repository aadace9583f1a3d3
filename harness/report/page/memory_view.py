"""The page's view of memory snapshots: for each device a timeline, and what holds how much."""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.report.check.sentences import printable
from harness.report.memory import device_lines, device_name, place_row, places_by_title
from harness.report.page.memory_plot import memory_plot
from harness.results.memory import MemoryPlace, MemorySummary
from harness.results.profile import MemoryTimeline

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
