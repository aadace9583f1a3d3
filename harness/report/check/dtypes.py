"""One engine in several dtypes, side by side: float32 is the lens for meaning, the engine's own for rounding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from harness.errors import printable
from harness.report.check.json import check_json
from harness.report.check.markdown import check_markdown, escaped
from harness.report.check.table import merge, merge_taps, number
from harness.report.check.terminal import check_text
from harness.report.document import SCHEMA_VERSION
from harness.results.check import CheckResult, Outcome, TapResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeChecks:
    """The checks of a command: one for each dtype."""

    results: Sequence[CheckResult]

    @property
    def outcome(self) -> Outcome:
        """The worst of all."""
        return Outcome.of_all(result.outcome for result in self.results)


def checks_text(checks: DtypeChecks, *, width: int, color: bool) -> str:
    """Return checks as a terminal shows them, those of several dtypes side by side first."""
    parts = [dtypes_text(checks.results) + "\n"] if len(checks.results) > 1 else []
    parts += [check_text(result, width=width, color=color) for result in checks.results]
    return "".join(f"{part}\n" for part in parts)


def checks_markdown(checks: DtypeChecks) -> str:
    """Return checks as Markdown, those of several dtypes side by side first."""
    parts = [dtypes_text(checks.results, tablefmt="github") + "\n"] if len(checks.results) > 1 else []
    parts += [check_markdown(result) for result in checks.results]
    return "".join(f"{part}\n" for part in parts)


def checks_json(checks: DtypeChecks) -> dict[str, Any]:
    """Return the document of the check; of several dtypes one document that holds each."""
    documents = [check_json(result) for result in checks.results]
    if len(documents) == 1:
        return documents[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": checks.outcome,
        "dtypes": [result.dtype for result in checks.results],
        "checks": documents,
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
