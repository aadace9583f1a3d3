"""The distance of two recordings in two precisions, as text. There is no verdict in it."""

import math
from collections.abc import Iterator

from harness.errors import Code
from harness.report.check.table import count, number
from harness.report.terminal import blocks_text, fact_lines, headline, table_lines
from harness.results.measurement import Measurement, TapError

_HEADERS = ("ends with", "median", "worst row", "relative L2", "growth", "median, logarithmic")
_ALIGN = ("left", "right", "right", "right", "right", "left")
_BAR, _DECADES = 24, 4
"""Cells of the longest bar, and the decades of roundings from 0.1 that it stands for."""
_MOST_NOTES = 4


def measurement_text(result: Measurement, *, width: int = 100) -> str:
    """Return a row for each layer, and the first tap above the level, as lines for a terminal."""
    what = "{1} in {3} against {0} in {2}".format(*result.paths, *result.dtypes)
    legend = [f"median and worst row of a layer's last tap in roundings to {result.unit}, relative L2 of the worst row"]
    blocks = [
        [headline("MEASURED", what, count(result.num_requests, "request"), count(len(result.taps), "tap"))],
        ["This is not a verdict: no bound holds between two precisions, and a mistake may be as small as rounding."],
        table_lines([_row(tap) for tap in result.taps if tap.ends_layer], _HEADERS, _ALIGN, legend=legend),
        list(fact_lines(_facts(result), width, indent=18)),
    ]
    return blocks_text(blocks)


def _row(tap: TapError) -> tuple[str, ...]:
    growth = "" if tap.growth is None else f"x{number(tap.growth)}"
    median = tap.roundings_median
    share = (math.log10(median) + 1) / _DECADES if 0 < median < math.inf else float(median > 0)
    bar = "█" * round(_BAR * min(1.0, max(0.0, share)))
    return (tap.tap, *map(number, (median, tap.roundings_max, tap.relative_l2_max)), growth, bar)


def _facts(result: Measurement) -> Iterator[tuple[str, str]]:
    first = result.first_above
    what = "no tap" if first is None else f"{first.tap}, {number(first.roundings_max)} roundings"
    yield f"first above {result.level:g}", what
    if (logits := result.logits) is not None:
        agree = f"the likeliest token is the same in {logits.top1_agreement:.1%} of {count(logits.num_rows, 'row')}"
        yield "logits", f"{agree}; KL divergence at most {number(logits.kl_max)} nats"
    for tap in result.taps:
        if tap.num_not_finite:
            yield "not finite", f"{Code.NOT_FINITE}: {count(tap.num_not_finite, 'element')} of {tap.tap}"
    yield from (("note", note) for note in result.notes[:_MOST_NOTES])
    if len(result.notes) > _MOST_NOTES:
        yield "", f"and {len(result.notes) - _MOST_NOTES} more notes (--format json)"
    yield "for a verdict", "compare each with a golden of its dtype: harness golden --dtype, record --golden, diff"
