"""Growth of the error along depth, operation by operation, and along position, token by token."""

import math
from collections.abc import Sequence

from harness.report.check.sentences import number, printable
from harness.report.page.plot import Dot, Line, Plot, polyline
from harness.report.page.scale import Scale, Tick, linear_scale, log_scale
from harness.results.check import PositionError, RunResult, TapResult

_MAX_DOTS = 400
"""Taps drawn as dots of their own; of a deeper model only the wrong ones are."""


def growth_along_depth(run: RunResult) -> Plot | None:
    """Plot the propagated error of every tap in the order of computation; None if none was measured."""
    taps = [(tap, ratio) for tap in run.taps if (ratio := tap.propagated_ratio_max) is not None]
    if len(taps) < 2:
        return None
    x = linear_scale([len(taps) - 1])
    y = log_scale([1.0, *(ratio for _, ratio in taps)])
    has_exact = any(ratio == 0 for _, ratio in taps)
    if has_exact:  # on a line of their own, below every error
        y = Scale(y.low / 10, y.high, is_log=True)
    points = [(x.at(index), y.at(ratio)) for index, (_, ratio) in enumerate(taps)]
    culprit = run.first_divergence.tap if run.first_divergence else None
    dots = tuple(
        Dot(
            x=at,
            y=height,
            style="culprit" if tap.name == culprit else "wrong" if tap.verdict.is_wrong else "",
            title=printable(f"{tap.name} · {number(ratio)} times HF's own" if ratio else f"{tap.name} · exact"),
            label=printable(tap.site) if tap.name == culprit else "",
        )
        for (at, height), (tap, ratio) in zip(points, taps, strict=True)
        if len(taps) <= _MAX_DOTS or tap.verdict.is_wrong or tap.name == culprit
    )
    return Plot(
        x_ticks=_layer_ticks([tap for tap, _ in taps]),
        y_ticks=y.ticks(lambda value: "exact" if has_exact and value < 1.01 * y.low else power(value)),
        x_label="layer",
        y_label="propagated error, as a multiple of HF's own",
        lines=(Line(path=_level(y.at(1.0)), style="rule"), Line(path=polyline(points), style="main")),
        dots=dots,
    )


def growth_along_position(errors: Sequence[PositionError], first_bad: int | None) -> Plot | None:
    """Plot the error that has built up by the end of the model over the positions; None if none was measured."""
    if len(errors) < 2:
        return None
    x = linear_scale([error.position for error in errors], low=min(error.position for error in errors))
    y = log_scale([1.0, *(value for error in errors for value in (error.ratio_median, error.ratio_max))])
    lines = [
        Line(path=_level(y.at(1.0)), style="rule"),
        Line(path=polyline((x.at(e.position), y.at(e.ratio_max)) for e in errors), style="main", title="largest"),
        Line(path=polyline((x.at(e.position), y.at(e.ratio_median)) for e in errors), style="soft", title="median"),
    ]
    if first_bad is not None:
        at = x.at(first_bad)
        lines.append(Line(path=f"M{at:g},0L{at:g},100", style="mark", title=f"first wrong row: position {first_bad}"))
    return Plot(
        x_ticks=x.ticks(lambda value: f"{value:g}"),
        y_ticks=y.ticks(power),
        x_label="position",
        y_label=f"the same at {printable(errors[0].tap)}: largest, and median below it",
        lines=tuple(lines),
    )


def _layer_ticks(taps: Sequence[TapResult]) -> tuple[Tick, ...]:
    """Return a tick where each of some ten layers begins."""
    begins: dict[int, int] = {}
    for index, tap in enumerate(taps):
        if tap.layer is not None:
            begins.setdefault(tap.layer, index)
    step = max(1, math.ceil(len(begins) / 10))
    x = linear_scale([len(taps) - 1])
    return tuple(Tick(x.at(index), str(layer)) for layer, index in begins.items() if layer % step == 0)


def _level(height: float) -> str:
    return f"M0,{100 - height:g}L100,{100 - height:g}"


def power(value: float) -> str:
    """Return the label of a tick of a logarithmic axis."""
    return f"{value:g}" if 0.01 <= value < 1e4 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
