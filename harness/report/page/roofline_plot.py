"""The roofline: what operations reach, under what the machine can do (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.profile_results import Ceilings, PhaseProfile, RooflinePoint
from harness.report.page.plot import Dot, Line, Plot, polyline
from harness.report.page.scale import log_scale
from harness.report.sentences import number, printable

_NUM_LABELS = 4
"""Operations whose name is written beside their dot: those with the most FLOPs."""
_LABEL_WIDTH, _LABEL_HEIGHT = 45.0, 5.0
"""Percent of the plot that a label takes."""


def roofline_plot(phase: PhaseProfile, roofs: Ceilings) -> Plot | None:
    """Plot a phase and its operations; None where nothing has FLOPs and a time."""
    points = [(point, rate) for point in phase.roofline if (rate := _rate(point)) and point.intensity > 0]
    if not points:
        return None
    peak = roofs.matmul_flops_per_s
    ridge = peak / roofs.copy_bytes_per_s
    x = log_scale([*(point.intensity for point, _ in points), ridge / 3, ridge * 3], least_decades=2)
    y = log_scale([*(rate for _, rate in points), peak], least_decades=2)
    # The slanted roof enters at the left edge, or at the floor where that is higher.
    start = max(x.low, y.low / roofs.copy_bytes_per_s)
    roof = [(start, start * roofs.copy_bytes_per_s), (ridge, peak), (x.high, peak)]
    places = {point.name: (x.at(point.intensity), y.at(rate)) for point, rate in points}
    named = _named(sorted(points, key=lambda pair: -pair[0].flops), places)
    return Plot(
        x_ticks=x.ticks(lambda value: f"{value:g}"),
        y_ticks=y.ticks(_flops),
        x_label="FLOPs per byte",
        y_label="FLOP/s",
        lines=(Line(path=polyline((x.at(at), y.at(rate)) for at, rate in roof), style="roof"),),
        dots=tuple(
            Dot(
                x=x.at(point.intensity),
                y=y.at(rate),
                style="whole" if point.name == phase.name else "",
                title=printable(_title(point, rate)),
                label=printable(point.name) if point.name in named else "",
            )
            for point, rate in points
        ),
    )


def _named(
    points: Sequence[tuple[RooflinePoint, float]], places: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return the first few points whose labels do not cover one another, with their places."""
    named: dict[str, tuple[float, float]] = {}
    for point, _ in points:
        x, y = places[point.name]
        is_free = all(abs(x - at) > _LABEL_WIDTH or abs(y - height) > _LABEL_HEIGHT for at, height in named.values())
        if is_free and len(named) <= _NUM_LABELS:
            named[point.name] = x, y
    return named


def _rate(point: RooflinePoint) -> float:
    return point.flops / (point.time_us * 1e-6) if point.time_us else 0.0


def _title(point: RooflinePoint, rate: float) -> str:
    return f"{point.name} · {_flops(rate)} at {number(point.intensity)} FLOPs per byte · bound by {point.bound_by}"


def _flops(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}FLOP/s"
    return f"{value:.3g} FLOP/s"
