"""The roofline: what operations reach, under what the machine can do (Williams, Waterman, Patterson 2009)."""

from collections.abc import Sequence

from harness.report.check.sentences import number, printable
from harness.report.page.plot import Dot, Line, Plot, polyline
from harness.report.page.scale import log_scale
from harness.results.profile import Ceilings, PhaseProfile, RooflinePoint

_LABEL_WIDTH, _LABEL_HEIGHT = 6.0, 5.0
"""Percent of a narrow plot that a number takes."""
_SIDES = {"right": (1, 0), "left": (-1, 0), "above": (0, 1), "below": (0, -1)}


def roofline_plot(phase: PhaseProfile, roofs: Ceilings) -> Plot | None:
    """Plot a phase and its operations; None if nothing has FLOPs and a time."""
    points = [(point, rate) for point in phase.roofline if (rate := _rate(point)) and point.intensity > 0]
    if not points:
        return None
    peak = roofs.matmul_flops_per_s
    ridge = peak / roofs.copy_bytes_per_s
    x = log_scale([*(point.intensity for point, _ in points), ridge / 3, ridge * 3], least_decades=2)
    y = log_scale([*(rate for _, rate in points), peak], least_decades=2)
    # The slanted roof enters at the left edge, or at the floor if that is higher.
    start = max(x.low, y.low / roofs.copy_bytes_per_s)
    roof = [(start, start * roofs.copy_bytes_per_s), (ridge, peak), (x.high, peak)]
    points.sort(key=lambda pair: (pair[0].name != phase.name, -pair[0].flops))
    places = [(x.at(point.intensity), y.at(rate)) for point, rate in points]
    sides = _sides(places)
    return Plot(
        x_ticks=x.ticks(lambda value: f"{value:g}"),
        y_ticks=y.ticks(_flops),
        x_label="FLOPs per byte",
        y_label="FLOP/s",
        lines=(Line(path=polyline((x.at(at), y.at(rate)) for at, rate in roof), style="roof"),),
        dots=tuple(
            Dot(
                x=at,
                y=height,
                style="whole" if point.name == phase.name else "",
                title=printable(_title(point, rate)),
                label=str(number),
                name=printable(point.name),
                side=side,
            )
            for number, ((point, rate), (at, height), side) in enumerate(zip(points, places, sides, strict=True), 1)
        ),
    )


def _sides(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return for each dot the side where its number covers no other number and no other dot, if there is one."""
    taken = list(places)
    sides = []
    for x, y in places:
        centres = {side: (x + right * _LABEL_WIDTH, y + up * _LABEL_HEIGHT) for side, (right, up) in _SIDES.items()}
        side = max(centres, key=lambda name: (_room(centres[name], taken, (x, y)), -list(_SIDES).index(name)))
        taken.append(centres[side])
        sides.append(side)
    return sides


def _room(centre: tuple[float, float], taken: Sequence[tuple[float, float]], own: tuple[float, float]) -> float:
    """Return how far what is nearest is, in labels, one and more being as good as far away; 0 outside of the plot."""
    if not (0 <= centre[0] <= 100 and 0 <= centre[1] <= 100):
        return 0.0
    others = (place for place in taken if place != own)
    away = (max(abs(centre[0] - x) / _LABEL_WIDTH, abs(centre[1] - y) / _LABEL_HEIGHT) for x, y in others)
    return min(1.0, min(away, default=1.0))


def _rate(point: RooflinePoint) -> float:
    return point.flops / (point.time_us * 1e-6) if point.time_us else 0.0


def _title(point: RooflinePoint, rate: float) -> str:
    return f"{point.name} · {_flops(rate)} at {number(point.intensity)} FLOPs per byte · bound by {point.bound_by}"


def _flops(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}FLOP/s"
    return f"{value:.3g} FLOP/s"
