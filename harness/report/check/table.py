"""The table by layer and operation, before any form: its rows, with the taps that share a row, and its columns.

A sound check has one row per operation, over all layers. A check with a culprit shows the culprit's layer operation by
operation, and folds every other layer; a model of 80 layers takes no more room than one of 4. The rule by which results
merge stands beside each field, in `harness.results.check`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from math import isnan

from harness.results.check import CheckResult, Coverage, Divergence, Outcome, RowId, RunResult, TapResult, TokenResult
from harness.results.merging import merged


def merge_taps(runs: Iterable[RunResult]) -> tuple[TapResult, ...]:
    """Return every tap of the runs once, in the order of the first run that has it."""
    by_name: dict[str, list[TapResult]] = {}
    for run in runs:
        for tap in run.taps:
            by_name.setdefault(tap.name, []).append(tap)
    return tuple(merge(taps) for taps in by_name.values())


def merge(taps: Sequence[TapResult]) -> TapResult:
    """Return one result that stands for all of `taps`, named as the worst of them."""
    return merged(taps, worst=max(taps, key=severity))


def severity(tap: TapResult) -> tuple[int, float, float]:
    """Return a key that sorts taps from the best to the worst."""
    share, ratio = tap.local_bound_share_max, tap.propagated_ratio_max
    return tap.verdict.severity, _nan_last(share or 0.0), _nan_last(ratio or 0.0)


def sum_tokens(runs: Sequence[RunResult]) -> TokenResult:
    """Return the token counts of all runs together."""
    return merged([run.tokens for run in runs], worst=TokenResult())


def sum_coverage(runs: Sequence[RunResult]) -> Coverage:
    """Return the coverage of all runs together; names appear once, in order of first appearance."""
    return merged([run.coverage for run in runs], worst=Coverage())


def sum_seconds(seconds: Sequence[float | None]) -> float | None:
    """Return the sum of the measured values, None if there are none."""
    measured = [value for value in seconds if value is not None]
    return sum(measured) if measured else None


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


CONSEQUENCE_RATIO = 3.0
"""Propagated error, over HF's own, from which a sound operation after the culprit is called downstream."""

MAX_FOLDED_ROWS = 6
"""Wrong operations that are listed one by one for the layers that are folded."""


class Role(StrEnum):
    """Role of a row in the search for the first wrong operation."""

    SOUND = "sound"
    CULPRIT = "culprit"
    WRONG = "wrong"
    """Wrong by itself, but not the first."""
    MISSING = "missing"
    DOWNSTREAM = "downstream"
    """Sound by itself, but computed from wrong input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: one tap, or one operation over several layers, or several operations."""

    layers: str
    """`3`, `0-27`, or nothing outside of the layers."""
    label: str
    tap: TapResult
    role: Role
    num_taps: int = 1
    num_failed: int = 0
    """Taps among them that have the row's verdict if that is a failure."""

    @property
    def remark(self) -> str:
        """The verdict in words, with its extent if it is a failure."""
        if self.role is Role.DOWNSTREAM:
            return self.role.value
        return f"{self.tap.verdict}{self._extent()}"

    def _extent(self) -> str:
        if not self.tap.verdict.failure:
            return ""
        if self.num_taps > 1:
            return f" in {count(self.num_failed, 'tap')}"
        if self.tap.num_nan:
            return f", {self.tap.num_nan:,} NaN"
        if self.tap.num_inf:
            return f", {self.tap.num_inf:,} Inf"
        return f" in {count(self.tap.num_bad_rows, 'row')}" if self.tap.num_bad_rows else ""


@dataclass(frozen=True, slots=True)
class Section:
    """Schedules that show the same: one table stands for all of them."""

    runs: tuple[RunResult, ...]

    @property
    def schedules(self) -> str:
        """Names of the schedules."""
        return ", ".join(run.schedule for run in self.runs)

    @property
    def outcome(self) -> Outcome:
        """Outcome of each of them."""
        return self.runs[0].outcome

    @property
    def divergence(self) -> Divergence | None:
        """First divergence of the first of them; all have it at the same tap."""
        return self.runs[0].first_divergence

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        return table_rows(merge_taps(self.runs), self.divergence.tap if self.divergence else None)


def sections(result: CheckResult) -> list[Section]:
    """Return the schedules in groups of the same outcome, the same culprit and the same failed operations."""
    groups: dict[object, list[RunResult]] = {}
    for run in result.runs:
        culprit = run.first_divergence.tap if run.first_divergence else None
        failed = frozenset((tap.name, tap.verdict) for tap in run.taps if tap.verdict.failure)
        groups.setdefault((run.outcome, culprit, failed), []).append(run)
    return [Section(tuple(runs)) for runs in groups.values()]


def table_rows(taps: Sequence[TapResult], culprit: str | None) -> list[Row]:
    """Return the rows for taps in graph order, around `culprit` if there is one."""
    layer = next((tap.layer for tap in taps if tap.name == culprit), None)
    is_behind, rows = False, list[Row]()
    for part, group in groupby(taps, key=lambda tap: _part(tap, layer)):
        members = list(group)
        if part in ("outside", "expanded"):
            parts: Iterable[Row] = (_row([tap], tap.site) for tap in members)
        else:
            parts = _per_site(members) if part == "all" else _folded(members)
        for row in parts:
            is_culprit = row.tap.name == culprit
            rows.append(replace(row, role=Role.CULPRIT if is_culprit else _role(row.tap, is_behind)))
            is_behind |= is_culprit
    return rows


def _part(tap: TapResult, layer: int | None) -> str:
    if tap.layer is None:
        return "outside"
    if layer is None:
        return "all"
    return "expanded" if tap.layer == layer else "before" if tap.layer < layer else "after"


def _role(tap: TapResult, is_behind: bool) -> Role:
    if tap.verdict.failure:
        return Role(tap.verdict.failure)
    ratio = tap.propagated_ratio_max
    is_off = ratio is not None and (isnan(ratio) or ratio > CONSEQUENCE_RATIO)
    return Role.DOWNSTREAM if is_behind and is_off else Role.SOUND


def _per_site(taps: Iterable[TapResult]) -> Iterator[Row]:
    by_site: dict[str, list[TapResult]] = {}
    for tap in taps:
        by_site.setdefault(tap.site, []).append(tap)
    return (_row(members, site) for site, members in by_site.items())


def _folded(taps: Sequence[TapResult]) -> Iterator[Row]:
    """Yield one row per operation that failed, after one for all that did not."""
    failed_sites = {tap.site for tap in taps if tap.verdict.failure}
    worst = sorted(_per_site(tap for tap in taps if tap.site in failed_sites), key=lambda row: severity(row.tap))
    listed = {row.label for row in worst[-MAX_FOLDED_ROWS:]}
    sound = [tap for tap in taps if tap.site not in failed_sites]
    unlisted = [tap for tap in taps if tap.site in failed_sites - listed]
    if sound:
        num_sites = len({tap.site for tap in sound})
        yield _row(sound, f"{'other' if failed_sites else 'all'} {count(num_sites, 'operation')}")
    yield from _per_site(tap for tap in taps if tap.site in listed)
    if unlisted:
        yield _row(unlisted, f"{len(failed_sites - listed)} more operations")


def _row(taps: Sequence[TapResult], label: str) -> Row:
    worst = merge(taps)
    num_failed = sum(tap.verdict is worst.verdict for tap in taps)
    layers = _span([tap.layer for tap in taps if tap.layer is not None])
    return Row(layers=layers, label=label, tap=worst, role=Role.SOUND, num_taps=len(taps), num_failed=num_failed)


def _span(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    first, last = min(layers), max(layers)
    return str(first) if first == last else f"{first}-{last}"


def count(number: int, noun: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number(value: float | None) -> str:
    """Return a number with three significant digits, `-` for what was not measured."""
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 999.5 <= abs(value) < 999_999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1e-4 else f"{value:.2e}"


BAR_WIDTH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table."""

    header: str
    cell: Callable[[Row], str]
    meaning: str | None = None
    """For the legend, with `{dtype}` for the engine's; neighbours of one meaning share a line."""
    align: str = "right"
    rank: int = 0
    """If a terminal is too narrow, the column of the highest rank goes first; rank 0 stays."""
    is_for_terminals: bool = False
    """Whether Markdown and HTML leave it out."""


_ITSELF = "error of the operation itself, in roundings to {dtype}"

LABEL = 1
"""Index of the column that is shortened if nothing is left to leave out."""

COLUMNS = (
    Column(header="layer", cell=lambda row: row.layers),
    Column(header="operation", cell=lambda row: row.label, align="left"),
    Column(header="rows", cell=lambda row: f"{row.tap.num_rows:,}", rank=2),
    Column(header="median", cell=lambda row: number(row.tap.local_roundings_median), meaning=_ITSELF),
    Column(header="p99", cell=lambda row: number(row.tap.local_roundings_p99), rank=3, is_for_terminals=True),
    Column(header="max", cell=lambda row: number(row.tap.local_roundings_max), meaning=_ITSELF),
    Column(
        header="bound",
        cell=lambda row: number(row.tap.local_bound_share_max),
        meaning="its largest share of what is allowed; above 1 is a bug",
    ),
    Column(
        header="", cell=lambda row: _bar(row.tap.local_bound_share_max), align="left", rank=1, is_for_terminals=True
    ),
    Column(
        header="propagated",
        cell=lambda row: number(row.tap.propagated_ratio_max),
        meaning="error that has built up, as a multiple of HF's own in {dtype}",
    ),
    Column(
        header="rel. L2", cell=lambda row: number(row.tap.propagated_relative_l2_max), rank=4, is_for_terminals=True
    ),
    Column(header="worst row", cell=lambda row: _row_id(row.tap.worst), rank=5, is_for_terminals=True),
    Column(header="verdict", cell=lambda row: row.remark, align="left"),
)

PAGE_COLUMNS = tuple(column for column in COLUMNS if not column.is_for_terminals)
"""Those of Markdown and HTML, whose readers have room for no more."""


def legend(dtype: str, *, has_downstream: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the headers that need an explanation, and their meanings.

    Args:
        dtype: the engine's.
        has_downstream: whether a row of the table is called downstream.
    """
    explained = [column for column in COLUMNS if column.meaning]
    for meaning, columns in groupby(explained, key=lambda column: column.meaning or ""):
        yield ", ".join(column.header for column in columns), meaning.format(dtype=dtype)
    if has_downstream:
        yield "downstream", "sound by itself, computed from wrong input"


def _bar(share: float | None) -> str:
    """Return a bar of a share of the bound; the last of its cells is only reached beyond the bound."""
    if share is None:
        return ""
    if not share <= 1:
        return "█" * BAR_WIDTH
    eighths = round(share * (BAR_WIDTH - 1) * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _row_id(row: RowId | None) -> str:
    return f"{row.request}:{row.position}" if row else "-"
