"""One plot: axes with round ticks, linear or logarithmic; lines, areas and dots in percent of its area."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Tick:
    """One labelled place of an axis."""

    at: float
    """Percent of the axis."""
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value in percent, inside of the axis for whatever lies beyond it."""
        if math.isnan(value):
            return 100.0
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(100 * (value - low) / (high - low), 3)

    def ticks(self, label: Callable[[float], str], *, max_ticks: int = 6) -> tuple[Tick, ...]:
        """Return round values inside of the axis."""
        values = _decades(self.low, self.high, max_ticks) if self.is_log else _round(self.low, self.high, max_ticks)
        return tuple(Tick(self.at(value), label(value)) for value in values)


def log_scale(values: Iterable[float], *, least_decades: int = 1) -> Scale:
    """Return a logarithmic axis of whole decades around the positive finite values."""
    usable = [value for value in values if 0 < value < math.inf]
    low = math.floor(math.log10(min(usable, default=1.0)))
    high = max(math.ceil(math.log10(max(usable, default=1.0))), low + least_decades)
    return Scale(10.0**low, 10.0**high, is_log=True)


def linear_scale(values: Iterable[float], *, low: float = 0.0) -> Scale:
    """Return an axis from `low` to the largest finite value."""
    high = max((value for value in values if math.isfinite(value)), default=low)
    return Scale(low, high if high > low else low + 1)


def _decades(low: float, high: float, max_ticks: int) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    step = max(1, math.ceil((last - first) / (max_ticks - 1)))
    return [10.0**power for power in range(first, last + 1, step)]


def _round(low: float, high: float, max_ticks: int) -> list[float]:
    rough = (high - low) / max(1, max_ticks - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in _STEPS if size * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line, or the outline of an area, as the commands of an SVG path."""

    path: str
    style: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point and its text under the pointer."""

    x: float
    y: float
    style: str
    title: str
    label: str = ""
    """The text beside it."""
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
