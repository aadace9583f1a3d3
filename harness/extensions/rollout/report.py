"""A comparison of a trainer with a rollout engine as text, and the page of a training run's gap over the steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.errors import printable
from harness.extensions.rollout.result import GapFigures, GapHistory, GapStep, GapTerm, RolloutResult, SideFigures
from harness.report.check.sentences import model_name
from harness.report.check.table import count, number
from harness.report.page.check_view import power
from harness.report.page.html import page_of
from harness.report.page.plot import Dot, Line, Plot, Scale, log_scale, polyline
from harness.report.terminal import MIN_WIDTH, VERDICTS, blocks_text, fact_lines, headline, table_lines

_HEADERS = ("term", "side", "mean", "abs mean", "rms", "floor", "explains", "verdict")
STEP_HEADERS = ("step", "verdict", "gap", "k3", "effective", "outside of their floor", "seconds", "share")
_ALIGN = ("left", "left", "right", "right", "right", "right", "right", "left")
_LEGEND = (
    "mean       of the trainer's log probability less the engine's, nats; the terms add up to the gap",
    "floor      what rounding alone gives of this term",
    "explains   how much of the gap's abs mean goes if this remedy alone is applied, in a replay of the rows",
)


def rollout_text(result: RolloutResult, *, width: int) -> str:
    """Return a comparison as lines of at most `width` columns, but for the table (about 85)."""
    width = max(width, MIN_WIDTH)
    return blocks_text([[_headline(result)], *_measured(result, width), fact_lines(_facts(result), width)])


def _headline(result: RolloutResult) -> str:
    compared = f"{count(result.num_rows, 'row')}, {count(result.tokens.compared, 'token')} compared"
    return headline(VERDICTS[result.outcome], result.rollouts, model_name(result.model), result.dtype, compared)


def _measured(result: RolloutResult, width: int) -> Iterator[Iterable[str]]:
    if result.gap is None:
        return
    yield fact_lines([("gap", _gap(result.gap))], width)
    rows = [_row(term, result.gap) for term in result.terms]
    yield table_lines(rows, _HEADERS, _ALIGN, legend=_LEGEND)
    if result.remedied is not None:
        left = f"all remedies together leave {number(result.remedied)} of {number(result.gap.mean_abs)} nats"
        yield fact_lines([("remedies", left)], width)
    findings = [
        (finding.code, f"row {finding.request}, token {finding.position}: {finding.message}")
        for finding in result.findings
    ]
    yield fact_lines(findings, width, indent=8)


def _gap(gap: GapFigures) -> str:
    return (
        f"mean {number(gap.mean)}, absolute {number(gap.mean_abs)}, rms {number(gap.rms)}, largest "
        f"{number(gap.max_abs)} nats; k1 {number(gap.k1)}, k3 {number(gap.k3)}; largest ratio {number(gap.max_ratio)}, "
        f"effective samples {100 * gap.effective_samples:.2f} %"
    )


def _row(term: GapTerm, gap: GapFigures) -> tuple[str, ...]:
    explains = "" if term.is_rounding else f"{number(term.explains)} of {number(gap.mean_abs)}"
    figures = (number(value) for value in (term.mean, term.mean_abs, term.rms, term.floor_rms))
    return (term.kind, term.side, *figures, explains, "rounding" if term.is_rounding else "outside")


def _facts(result: RolloutResult) -> Iterator[tuple[str, str]]:
    yield from ((side.name, _side(side)) for side in result.sides)
    tokens = result.tokens
    parts = {
        "compared": tokens.compared, "of prompts": tokens.prompt, "masked": tokens.masked, "padding": tokens.padding,
        "without a value": tokens.without_value, "left out": tokens.left_out,
    }  # fmt: skip
    shown = " + ".join(f"{value:,} {name}" for name, value in parts.items() if value or name == "compared")
    yield "tokens", f"{tokens.tokens:,} = {shown}"
    if result.not_judged:
        yield "not judged", printable("; ".join(result.not_judged))
    yield from (("note", printable(note)) for note in result.notes)
    yield "timings", f"{number(result.seconds)} s"


def _side(side: SideFigures) -> str:
    rest = "inside of" if side.is_explained else "outside of"
    return (
        f"{side.source}; {side.meaning}; rms {number(side.rms)} from the truth, rest {number(side.rest_rms)}, {rest} "
        f"the floor {number(side.floor_rms)}"
    )


def history_text(history: GapHistory, *, width: int) -> str:
    """Return the steps of a training run as a table of at most about 100 columns, and what is missing in the file."""
    rows = [step_row(step) for step in history.steps]
    align = ["right", "left", *["right"] * 3, "left", "right", "right"]
    lines = [headline(VERDICTS[history.outcome], history.file, count(len(rows), "step")), ""]
    lines += [f"  {line}".rstrip() for line in (table_lines(rows, STEP_HEADERS, align) if rows else ())]
    lines += fact_lines((("note", note) for note in history_notes(history)), max(width, MIN_WIDTH))
    return "\n".join(lines) + "\n"


def step_row(step: GapStep) -> tuple[str, ...]:
    """Return one step's cells, in the order of `STEP_HEADERS`; the gap is its mean absolute value in nats."""
    terms = (f"{term.kind} ({term.side})" for term in step.terms if not term.is_rounding)
    gap = step.gap
    figures = ("-", "-", "-") if gap is None else (
        number(gap.mean_abs), number(gap.k3), f"{100 * gap.effective_samples:.2f} %"
    )  # fmt: skip
    outside = printable(", ".join(terms))
    return (str(step.step), step.verdict, *figures, outside, number(step.seconds), f"{100 * step.share:.1f} %")


def history_notes(history: GapHistory) -> Iterator[str]:
    """Yield what a reader must know of the file itself."""
    if history.num_cut:
        verb = "ends" if history.num_cut == 1 else "end"
        yield f"{count(history.num_cut, 'line')} of the file {verb} in the middle (the run was killed): left out"
    if history.num_replaced:
        yield f"not shown: {count(history.num_replaced, 'mismatch')} of steps that a later line does again"


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
        terms = [(step.step, term) for step in steps for term in step.terms if _name(term) == name]
        points = [(x.at(at), y.at(value(term))) for at, term in terms]
        lines.append(Line(path=polyline(points), style=style, title=name))
        dots += [_dot(*item, *point, style) for item, point in zip(terms, points, strict=True)]
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


_TEMPLATES = Path(__file__).parent / "template"


def gap_html(history: GapHistory) -> str:
    """Return the page of a training run's gap: its terms over the steps, and a table of the steps."""
    styles = styles_of(history.steps)
    rows = [(step.verdict, step_row(step)) for step in history.steps]
    plots, notes = list(gap_plots(history.steps, styles)), list(history_notes(history))
    return page_of(
        _TEMPLATES, "gap.html.j2", styles=styles, rows=rows, plots=plots, notes=notes, headers=STEP_HEADERS,
        title=printable(history.file), verdict=history.outcome,
    )  # fmt: skip
