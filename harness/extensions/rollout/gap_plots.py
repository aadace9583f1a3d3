"""The terms of the gap over the steps of a training run: in nats, and as multiples of their floors."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.extensions.rollout.result import GapStep, GapTerm
from harness.report.check.sentences import number, printable
from harness.report.page.check_view import power
from harness.report.page.plot import Dot, Line, Plot, Scale, log_scale, polyline

_NUM_STYLES = 8


def styles_of(steps: Sequence[GapStep]) -> dict[str, str]:
    """Return the style of each term by its name, in the order in which they come."""
    names = dict.fromkeys(_name(term) for step in steps for term in step.terms)
    return {name: f"part-{at % _NUM_STYLES}" for at, name in enumerate(names)}


def gap_plots(steps: Sequence[GapStep], styles: Mapping[str, str]) -> Iterator[Plot]:
    """Yield the plots, which share their styles: nats, and multiples of floors; none if no step compared anything."""
    gaps = [(step.step, step.gap.mean_abs) for step in steps if step.gap is not None]
    if gaps:
        yield _plot(
            steps, styles, lambda term: term.mean_abs, "mean absolute value, nats: the gap, and its terms", gaps
        )
        floor = [(step, 1.0) for step, _ in gaps]
        yield _plot(steps, styles, _multiple, "RMS of each term, as a multiple of its floor", floor)


def _plot(
    steps: Sequence[GapStep],
    styles: Mapping[str, str],
    value: Callable[[GapTerm], float],
    label: str,
    whole: Sequence[tuple[int, float]],
) -> Plot:
    """Return the plot of a value of each term; `whole` is a line of its own, a value for each step."""
    x = Scale(whole[0][0], max(whole[-1][0], whole[0][0] + 1))
    y = log_scale([*(item for _, item in whole), *(value(term) for step in steps for term in step.terms)])
    lines, dots = [Line(path=polyline((x.at(at), y.at(item)) for at, item in whole), style="total")], []
    for name, style in styles.items():
        own = [(step.step, term) for step in steps for term in step.terms if _name(term) == name]
        points = [(x.at(at), y.at(value(term))) for at, term in own]
        lines.append(Line(path=polyline(points), style=style, title=name))
        dots += [_dot(*item, *point, style) for item, point in zip(own, points, strict=True)]
    ticks = x.ticks(lambda step: f"{step:g}"), y.ticks(power)
    return Plot(x_ticks=ticks[0], y_ticks=ticks[1], x_label="step", y_label=label, lines=tuple(lines), dots=tuple(dots))


def _dot(step: int, term: GapTerm, x: float, y: float, style: str) -> Dot:
    title = f"step {step} · {_name(term)} · {number(term.mean_abs)} nats, {number(_multiple(term))} times its floor"
    title += "" if term.is_rounding else f" · {term.detail}"
    return Dot(x=x, y=y, style=style if term.is_rounding else f"{style} wrong", title=printable(title))


def _name(term: GapTerm) -> str:
    return printable(f"{term.kind} ({term.side})")


def _multiple(term: GapTerm) -> float:
    return term.rms / term.floor_rms if term.floor_rms else 0.0
