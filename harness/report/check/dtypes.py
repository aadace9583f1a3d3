"""One engine in several dtypes, side by side: float32 is the lens for meaning, the engine's own for rounding."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from harness.report.check.json import SCHEMA_VERSION
from harness.report.check.markdown import escaped
from harness.report.check.merge import merge, merge_taps
from harness.report.check.sentences import number, printable
from harness.results.check import CheckResult, Outcome, TapResult


def dtypes_json(results: Sequence[CheckResult], documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one document of the checks and what each is by itself."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": Outcome.of_all(result.outcome for result in results),
        "dtypes": [result.dtype for result in results],
        "checks": list(documents),
    }


def dtypes_text(results: Sequence[CheckResult], *, tablefmt: str = "simple") -> str:
    """Return a table of every operation in every dtype: median and largest error in roundings, and the verdict."""
    columns = [_by_site(result) for result in results]
    sites = list(dict.fromkeys(site for column in columns for site in column))
    shown = escaped if tablefmt == "github" else printable
    rows = [[shown(site), *(cell for column in columns for cell in _cells(column.get(site)))] for site in sites]
    names = [(f"{shown(result.dtype)} median", "max", "verdict") for result in results]
    headers = ["operation, all layers", *(name for group in names for name in group)]
    align = ["left", *(side for _ in results for side in ("right", "right", "left"))]
    return tabulate(rows, headers=headers, tablefmt=tablefmt, colalign=align, disable_numparse=True)


def _by_site(result: CheckResult) -> dict[str, TapResult]:
    sites: dict[str, list[TapResult]] = {}
    for tap in merge_taps(result.runs):
        sites.setdefault(tap.site, []).append(tap)
    return {site: merge(taps) for site, taps in sites.items()}


def _cells(tap: TapResult | None) -> list[str]:
    if tap is None:
        return ["-", "-", "-"]
    return [number(tap.local_roundings_median), number(tap.local_roundings_max), str(tap.verdict)]
