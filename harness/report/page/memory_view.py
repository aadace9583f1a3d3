"""The page's view of memory snapshots: for each device a timeline, and what holds how much."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.report.check.sentences import printable
from harness.report.memory import device_lines, device_name, place_row, places_by_title
from harness.report.page.memory_plot import MemoryPlot, memory_plot
from harness.results.memory import MemoryPlace, MemorySummary
from harness.results.profile import MemoryTimeline

_MOST_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One device of a file."""

    title: str
    lines: tuple[str, ...]
    memory: MemoryPlot | None
    tables: tuple[tuple[str, list[list[str]]], ...]
    """Title, and the cells of each row."""


def device_views(summary: MemorySummary, timelines: Sequence[MemoryTimeline | None]) -> Iterator[DeviceView]:
    """Yield the view of each device of a file."""
    for device, timeline in zip(summary.devices, timelines, strict=True):
        yield DeviceView(
            title=printable(f"{summary.file}, {device_name(device)}"),
            lines=tuple(map(printable, device_lines(device))),
            memory=memory_plot(timeline) if timeline else None,
            tables=tuple((title, _rows(places)) for title, places in places_by_title(device).items()),
        )


def _rows(places: Sequence[MemoryPlace]) -> list[list[str]]:
    return [[printable(cell) for cell in place_row(each)] for each in places[:_MOST_ROWS]]
