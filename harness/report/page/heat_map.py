"""The heat map: operations down, layers across, each cell the error of one operation in roundings."""

import math
from collections.abc import Sequence
from typing import Any

from harness.report.check.sentences import number, printable
from harness.report.check.table import CONSEQUENCE_RATIO
from harness.results.check import TapResult

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
    for site, found in by_site.items():
        if None in found:
            outside.append({"label": printable(site), "cells": [_cell(found[None], culprit, behind)]})
        else:
            cells = [_cell(found[layer], culprit, behind) if layer in found else None for layer in layers]
            rows.append({"label": printable(site), "cells": cells})
    step = max(1, math.ceil(len(layers) / 10))
    labels = [str(layer) if index % step == 0 else "" for index, layer in enumerate(layers)]
    return {"layers": layers, "layer_labels": labels, "rows": rows, "outside": outside}


def level(roundings: float | None) -> int:
    """Return the colour of an error: 0 for none, up to 8; NaN is as dark as it gets."""
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
        parts.append(f"propagated {number(tap.propagated_ratio_max)} times HF's own")
    return printable(" · ".join(parts))
