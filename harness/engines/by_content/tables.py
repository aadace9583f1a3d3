"""Rows and columns of tensors: which dimension counts the tokens of a step, and where values are in it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from harness.engines.by_content.columns import ColumnIndex, Fit

_MOST_PADDING = 8
"""Rows that an engine adds to a small step, at most."""


class RowOrder(Enum):
    """How the rows of several requests lie in a tensor of one step."""

    PACKED = auto()
    """One after the other."""
    PADDED_RIGHT = auto()
    """Side by side in the first dimension, which is of requests; what is after the last row of each is padding."""
    PADDED_LEFT = auto()
    """Side by side as well; what is before the first row of each is padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where a tensor has one row for each token; what is after the last row is padding."""

    dim: int
    parts: int = 1
    """Rows of the dimension for each token: heads, where these are one dimension with the tokens."""

    def rows(self, tensor: torch.Tensor, num_rows: int) -> torch.Tensor | None:
        """Return [num_rows, any], a copy or a view; None if the tensor has less."""
        if tensor.dim() <= self.dim or tensor.shape[self.dim] < num_rows * self.parts:
            return None
        first = tensor.movedim(self.dim, 0)
        if self.parts > 1:
            if len(first) % self.parts:
                return None
            first = first.reshape(len(first) // self.parts, -1)
        return first[:num_rows].reshape(num_rows, -1)

    def rows_of(self, tensor: torch.Tensor, lengths: Sequence[int], order: RowOrder) -> torch.Tensor | None:
        """Return the rows of several requests, one after the other, [all of them, any]; None if the tensor has less."""
        if order is RowOrder.PACKED or len(lengths) == 1:
            return self.rows(tensor, sum(lengths))
        if self.parts > 1 or tensor.dim() <= self.dim:
            return None
        if not self.dim:  # requests and tokens as one dimension
            if len(tensor) % len(lengths):
                return None
            tensor = tensor.unflatten(0, (len(lengths), -1))
        padded = tensor.movedim(self.dim or 1, 1)
        width = padded.shape[1]
        if len(padded) != len(lengths) or width < max(lengths):
            return None
        begins = [width - length if order is RowOrder.PADDED_LEFT else 0 for length in lengths]
        own = zip(padded, begins, lengths, strict=True)
        return torch.cat([rows[begin : begin + length].reshape(length, -1) for rows, begin, length in own])


def layouts_with_rows(tensor: torch.Tensor, num_rows: int) -> Iterator[tuple[RowLayout, torch.Tensor]]:
    """Yield the ways in which a tensor may have a row for each token of a step, and the rows, [num_rows, any]."""
    for layout in _layouts(tensor.shape, num_rows):
        rows = layout.rows(tensor, num_rows)
        if rows is not None and rows.shape[1]:
            yield layout, rows


def _layouts(shape: torch.Size, num_rows: int) -> Iterator[RowLayout]:
    for dim, size in enumerate(shape):
        if num_rows <= size <= num_rows + _MOST_PADDING:
            yield RowLayout(dim=dim)
    if len(shape) >= 2 and shape[0] > num_rows + _MOST_PADDING:
        for padding in (0, 1):
            parts, rest = divmod(shape[0], num_rows + padding)
            if not rest:
                yield RowLayout(dim=0, parts=parts)


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
    return [
        Table(name, rows) for name, tensor in tensors.items() for _layout, rows in layouts_with_rows(tensor, num_rows)
    ]


class TableIndex:
    """The columns of tables; of a table with NaN or infinities, in the rows that have none."""

    def __init__(self, tables: Sequence[Table], *, rounding: float) -> None:
        """Project the tables."""
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
