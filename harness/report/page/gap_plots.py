"""The terms of the gap over the steps of a training run: in nats, and as multiples of their floors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.report.check.sentences import number, printable
from harness.report.page.growth import level, power
from harness.report.page.plot import Dot, Line, Plot, polyline
from harness.report.page.scale import Scale, log_scale
from harness.results.rollout import GapHistory, GapStep, GapTerm

_NUM_STYLES = 8
Value = Callable[[GapTerm], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPlots:
    """The plots, which share their colours."""

    nats: Plot
    floors: Plot
    terms: tuple[tuple[str, str], ...]
    """Style and name of each term."""


def gap_plots(history: GapHistory) -> GapPlots | None:
    """Return the plots; None if no step compared anything."""
    steps = [step for step in history.steps if step.gap is not None]
    if not steps:
        return None
    names = list(dict.fromkeys(_name(term) for step in steps for term in step.terms))
    styles = {name: f"part-{at % _NUM_STYLES}" for at, name in enumerate(names)}
    gaps = [step.gap.mean_abs for step in steps if step.gap is not None]
    nats = _plot(steps, styles, lambda term: term.mean_abs, "mean absolute value, nats: the gap, and its terms", gaps)
    floors = _plot(steps, styles, _multiple, "RMS of each term, as a multiple of its floor", [])
    return GapPlots(nats=nats, floors=floors, terms=tuple((style, name) for name, style in styles.items()))


def _plot(steps: Sequence[GapStep], styles: dict[str, str], value: Value, label: str, gaps: Sequence[float]) -> Plot:
    first, last = steps[0].step, steps[-1].step
    x = Scale(first, max(last, first + 1))
    y = log_scale([*(gaps or [1.0]), *(value(term) for step in steps for term in step.terms)])
    if gaps:
        points = [(x.at(step.step), y.at(gap)) for step, gap in zip(steps, gaps, strict=True)]
        lines = [Line(path=polyline(points), style="total", title="the gap")]
    else:
        lines = [Line(path=level(y.at(1.0)), style="rule", title="the floor")]
    dots = []
    for name, style in styles.items():
        own = [(step.step, term) for step in steps for term in step.terms if _name(term) == name]
        lines.append(Line(path=polyline((x.at(at), y.at(value(t))) for at, t in own), style=style, title=name))
        dots += [_dot(at, term, x.at(at), y.at(value(term)), style) for at, term in own]
    ticks = x.ticks(lambda step: f"{step:g}")
    return Plot(
        x_ticks=ticks, y_ticks=y.ticks(power), x_label="step", y_label=label, lines=tuple(lines), dots=tuple(dots)
    )


def _dot(step: int, term: GapTerm, x: float, y: float, style: str) -> Dot:
    title = f"step {step} · {_name(term)} · {number(term.mean_abs)} nats, {number(_multiple(term))} times its floor"
    title += "" if term.is_rounding else f" · {term.detail}"
    return Dot(x=x, y=y, style=style if term.is_rounding else f"{style} wrong", title=printable(title))


def _name(term: GapTerm) -> str:
    return printable(f"{term.kind} ({term.side})")


def _multiple(term: GapTerm) -> float:
    return term.rms / term.floor_rms if term.floor_rms else 0.0
