"""The tensors that have a row for each token, and where values are in them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from harness.engines.by_content.columns import ColumnIndex, Fit
from harness.engines.by_content.rows import layouts_with_rows

_LEAST_ROWS = 4
"""Rows that tell columns apart."""


@dataclass(frozen=True, slots=True)
class Table:
    """A tensor as rows."""

    name: str
    rows: torch.Tensor
    """[T, any]."""


def tables_of(tensors: Mapping[str, torch.Tensor], num_rows: int) -> list[Table]:
    """Return the tensors that have a row for each token, in each dimension that may count the tokens."""
    return [Table(name, rows) for name, each in tensors.items() for _layout, rows in layouts_with_rows(each, num_rows)]


class TableIndex:
    """The columns of tables; of a table with NaN or infinities, in the rows that have none."""

    def __init__(self, tables: Sequence[Table], *, rounding: float) -> None:
        """Project the tables.

        Args:
            tables: of one number of rows.
            rounding: RMS relative error of one rounding in the engine.
        """
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for at, table in enumerate(tables):
            kept = table.rows.isfinite().all(dim=1).nonzero()[:, 0].tolist()
            if len(kept) >= min(_LEAST_ROWS, len(table.rows)):
                groups[tuple(kept)].append(at)
        self._groups = [
            (list(kept), places, ColumnIndex([_rows(tables[at], kept) for at in places], rounding=rounding))
            for kept, places in groups.items()
        ]
        self._told = {at for places in groups.values() for at in places}
        self.fine = ColumnIndex([], rounding=rounding).fine
        """Relative error up to which a tensor is a value, to rounding."""

    def can_tell(self, table: int) -> bool:
        """Whether a table has finite rows that tell what it holds."""
        return table in self._told

    def find(self, value: torch.Tensor, *, exactly: bool = False) -> list[Fit]:
        """Return the tables that hold a value [T, W], as `ColumnIndex.find`."""
        found = [
            replace(fit, index=places[fit.index])
            for kept, places, index in self._groups
            for fit in index.find(value[kept], exactly=exactly)
        ]
        exact = [fit for fit in found if fit.error <= self.fine]
        return sorted(exact or found, key=lambda fit: fit.error)


def _rows(table: Table, kept: Sequence[int]) -> torch.Tensor:
    """Return some rows; all of them without a copy."""
    return table.rows if len(kept) == len(table.rows) else table.rows[list(kept)]
