"""The columns of the table by layer and operation, for every form: header, meaning, cell."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from harness.report.check.sentences import number
from harness.report.check.table import Row
from harness.results.check import RowId

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
