"""One plot: axes, lines, areas and dots, in percent of its area."""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.report.page.scale import Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line, or the outline of an area, as the commands of an SVG path."""

    path: str
    style: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point with what is said of it when it is pointed at."""

    x: float
    y: float
    style: str
    title: str
    label: str = ""
    """Written beside it."""
    name: str = ""
    """What the label stands for, in the list below the plot; empty: it is not listed."""
    side: str = ""
    """The label's side: `right`, `left`, `above` or `below`; empty: the side with more room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot; y grows upwards."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    dots: tuple[Dot, ...] = ()


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """Return the path through points given in percent, y upwards."""
    return "".join(f"{'L' if index else 'M'}{x:g},{100 - y:g}" for index, (x, y) in enumerate(points))
