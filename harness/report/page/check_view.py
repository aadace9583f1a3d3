"""The page's view of a check: the verdict, the heat map, and the growth of the error along depth and position."""

import math
from collections.abc import Sequence
from typing import Any

from harness.errors import printable
from harness.report.check.sentences import (
    divergence_place,
    divergence_size,
    explanation_label,
    explanation_lines,
    extent,
    facts,
    finding_lines,
    seen_sentence,
    source_sentence,
    subject,
)
from harness.report.check.table import (
    COLUMNS,
    CONSEQUENCE_RATIO,
    LABEL,
    PAGE_COLUMNS,
    Column,
    Section,
    legend,
    merge_taps,
    number,
    sections,
)
from harness.report.page.plot import Dot, Line, Plot, Scale, Tick, linear_scale, log_scale, polyline
from harness.results.check import CheckResult, Outcome, PositionError, Reference, RunResult, TapResult

LEVELS = (1.0, 2.0, 4.0, 8.0, 16.0, 100.0, 1e4)
"""Roundings from which the next darker colour begins."""


View = dict[str, Any]
"""What a template is given, by name."""


def heat_map(taps: Sequence[TapResult], culprit: str | None) -> View | None:
    """Return the heat map of the taps of a run, None if there are none.

    A row is an operation over the layers, with None for a layer that has none; `outside` are the rows of one cell:
    embedding, final norm, head.
    """
    if not taps:
        return None
    layers = sorted({tap.layer for tap in taps if tap.layer is not None})
    behind = _names_behind(taps, culprit)
    by_site: dict[str, dict[int | None, TapResult]] = {}
    for tap in taps:
        by_site.setdefault(tap.site, {})[tap.layer] = tap
    rows, outside = [], []
    for site, taps_by_layer in by_site.items():
        if None in taps_by_layer:
            outside.append({"label": printable(site), "cells": [_cell(taps_by_layer[None], culprit, behind)]})
        else:
            cells = [
                _cell(taps_by_layer[layer], culprit, behind) if layer in taps_by_layer else None for layer in layers
            ]
            rows.append({"label": printable(site), "cells": cells})
    step = max(1, math.ceil(len(layers) / 10))
    labels = [str(layer) if index % step == 0 else "" for index, layer in enumerate(layers)]
    return {"layers": layers, "layer_labels": labels, "rows": rows, "outside": outside}


def level(roundings: float | None) -> int:
    """Return the colour of an error: 0 for none, up to 8; NaN has the darkest."""
    if roundings is None or roundings == 0:
        return 0
    if math.isnan(roundings):
        return len(LEVELS) + 1
    return 1 + sum(roundings >= bound for bound in LEVELS)


def _names_behind(taps: Sequence[TapResult], culprit: str | None) -> set[str]:
    names = [tap.name for tap in taps]
    return set(names[names.index(culprit) + 1 :]) if culprit in names else set()


def _cell(tap: TapResult, culprit: str | None, behind: set[str]) -> View:
    """Return the classes of a cell, `level-3` and what else it is, and its title."""
    styles = [f"level-{level(tap.local_roundings_max)}"]
    if tap.verdict.failure:
        styles.append(tap.verdict.failure)
    if tap.name == culprit:
        styles.append("culprit")
    ratio = tap.propagated_ratio_max
    if tap.name in behind and ratio is not None and not ratio <= CONSEQUENCE_RATIO:
        styles.append("downstream")
    return {"style": " ".join(styles), "title": _title(tap)}


def _title(tap: TapResult) -> str:
    parts = [tap.name, tap.verdict.value]
    if tap.local_roundings_max is not None:
        parts.append(f"{number(tap.local_roundings_max)} roundings, {number(tap.local_bound_share_max)} of the bound")
    if tap.propagated_ratio_max is not None:
        parts.append(f"propagated {number(tap.propagated_ratio_max)}")
    return printable(" · ".join(parts))


_AXES = {
    Reference.TRUTH: "propagated error, as a multiple of HF's own",
    Reference.HF: "propagated error against HF in the same dtype, in estimated roundings",
    Reference.RECORDING: "propagated error, in estimated roundings",
}
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
            title=printable(f"{tap.name} · propagated {number(ratio)}" if ratio else f"{tap.name} · exact"),
            label=printable(tap.site) if tap.name == culprit else "",
        )
        for (at, height), (tap, ratio) in zip(points, taps, strict=True)
        if len(taps) <= _MAX_DOTS or tap.verdict.is_wrong or tap.name == culprit
    )
    return Plot(
        x_ticks=_layer_ticks([tap for tap, _ in taps]),
        y_ticks=y.ticks(lambda value: "exact" if has_exact and value < 1.01 * y.low else power(value)),
        x_label="layer",
        y_label=_AXES[run.propagated_from],
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


def check_view(result: CheckResult) -> View:
    """Return what the template of a check is given."""
    findings, rest = finding_lines(result)
    return {
        "verdict": result.outcome.value,
        "sentence": _sentence(result),
        "subject": tuple(subject(result)),
        "extent": tuple(extent(result)),
        "seen": seen_sentence(result),
        "sections": tuple(_section(section) for section in sections(result)),
        "findings": tuple(findings),
        "more_findings": rest,
        "facts": tuple(facts(result)),
        "dtype": printable(result.dtype),
        "columns": tuple((column.header, _style(column)) for column in PAGE_COLUMNS),
        "legend": " ".join(f"{words}: {meaning}." for words, meaning in legend(printable(result.dtype))),
    }


def _style(column: Column) -> str:
    if column is COLUMNS[LABEL]:
        return "code"
    return "number" if column.align == "right" else ""


def _sentence(result: CheckResult) -> str:
    """Return the outcome of the check in a sentence."""
    divergence = result.first_divergence
    if divergence is not None:
        return f"The first operation that is wrong is {printable(divergence.tap)}, from {divergence_place(divergence)}."
    return {
        Outcome.PASS: "Every operation computes what HuggingFace computes, as well as rounding permits.",
        Outcome.MISMATCH: "No operation is out of bounds, but something expected differs or was not recorded.",
        Outcome.NOTHING: "Nothing was compared, so nothing is known.",
    }[result.outcome]


def _section(section: Section) -> View:
    run = section.runs[0]
    divergence = section.divergence
    return {
        "schedules": printable(section.schedules),
        "outcome": section.outcome.value,
        "culprit": _culprit(section),
        "heat": heat_map(merge_taps(section.runs), divergence.tap if divergence else None),
        "depth": growth_along_depth(run),
        "position": growth_along_position(run.positions, divergence.position if divergence else None),
        "lines": [
            {"cells": [printable(column.cell(row)) for column in PAGE_COLUMNS], "role": row.role.value}
            for row in section.rows()
        ],
    }


def _culprit(section: Section) -> View | None:
    divergence = section.divergence
    if divergence is None:
        return None
    explanation = divergence.explanation
    cause, *details = explanation_lines(explanation) if explanation else (None,)
    return {
        "tap": printable(divergence.tap),
        "code": divergence.code.value,
        "place": divergence_place(divergence),
        "size": divergence_size(divergence),
        "source": source_sentence(divergence),
        "label": explanation and explanation_label(explanation),
        "cause": cause,
        "details": tuple(detail for detail in details if detail),
    }
