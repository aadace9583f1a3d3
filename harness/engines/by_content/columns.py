"""Which tensors hold a value, in which rows and columns.

One dimension of a tensor counts the tokens of a step. Random projections find the columns: the whole tensor, a slice of
it, or columns in another order.

`T` rows, `W` columns of a value, `C` columns of all tensors together, `P` projections.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

_NUM_PROJECTIONS = 5
_NUM_SAMPLES = 4
"""Columns of a value that are looked for everywhere; a tensor that lacks one of them is none that holds it."""
LOOSE = 0.1
"""Relative error up to which a slice is taken for a value: what is a little wrong is still what it is meant to be."""
_LEAST_FINE = 2e-5
_FINE_ROUNDINGS = 24
_SAME_FACTOR, _SAME_ROUNDINGS = 1.5, 2
"""A tensor that is nearly as near to a value as the nearest one may be the value, too."""
_MOST_TENSORS = 256
"""Tensors that are compared as a whole with one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a tensor that hold a value."""

    start: int
    stop: int
    order: tuple[int, ...] | None = None
    """Column of each element of the value, where they are not side by side."""

    @property
    def is_rising(self) -> bool:
        """Whether the elements of the value have their own order, with or without others between them."""
        return self.order is None or all(a < b for a, b in pairwise(self.order))

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The order, without the columns of no element; None if it is rising."""
        if self.order is None or self.is_rising:
            return None
        rank = {column: at for at, column in enumerate(sorted(self.order))}
        return tuple(rank[column] for column in self.order)

    @property
    def places(self) -> Sequence[int]:
        """Column of each element of the value."""
        return range(self.start, self.stop) if self.order is None else self.order

    def shared(self, other_columns: "Columns") -> tuple[list[int], list[int]]:
        """Return which elements of this value and of another are of the same columns of one tensor."""
        if self.start >= other_columns.stop or other_columns.start >= self.stop:
            return [], []
        element = {column: at for at, column in enumerate(self.places)}
        pairs = [(element[column], at) for at, column in enumerate(other_columns.places) if column in element]
        return [mine for mine, _ in pairs], [at for _, at in pairs]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [T, W] of rows [T, ...]."""
        flat = rows.reshape(len(rows), -1)
        return flat[:, self.start : self.stop] if self.order is None else flat[:, list(self.order)]

    def __str__(self) -> str:
        return f"columns {self.start} to {self.stop - 1}" + ("" if self.order is None else ", in another order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A tensor that holds a value."""

    index: int
    """Of the tensor."""
    columns: Columns
    error: float
    """RMS over the columns of the relative error."""


class ColumnIndex:
    """The columns of many tensors."""

    def __init__(self, tables: Sequence[torch.Tensor], *, rounding: float) -> None:
        """Project the tensors.

        Args:
            tables: [T, any] each, of one T.
            rounding: RMS relative error of one rounding in the engine.
        """
        self._tables = tables
        self.fine = fine_limit(rounding)
        num_rows = len(tables[0]) if tables else 1
        generator = torch.Generator().manual_seed(0)
        self._probes = torch.randn(_NUM_PROJECTIONS, num_rows, generator=generator, dtype=torch.float64)
        self._probes /= num_rows**0.5
        self._zeros = [at for at, table in enumerate(tables) if not bool(table.any())]
        widths = [table.shape[1] for table in tables]
        projected = [self._project(table) for table in tables]
        self._all = torch.cat(projected, dim=1) if projected else torch.zeros(_NUM_PROJECTIONS, 0)  # [P, C]
        self._owner = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths, dtype=torch.int64))
        self._start = [0, *accumulate(widths)]
        self._order = self._all[0].argsort()
        self._sorted = self._all[0][self._order].contiguous()
        self._sorted_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def find(self, value: torch.Tensor, *, exactly: bool = False) -> list[Fit]:
        """Return the tensors that hold a value [T, W], the nearest first; exact ones alone, if there are some.

        Args:
            value: what is looked for.
            exactly: whether to look for exact ones alone.
        """
        value = value.double()
        if not bool(value.isfinite().all()):
            return []
        if not bool(value.any()):
            whole = Columns(start=0, stop=value.shape[1])
            zeros = [at for at in self._zeros if self._tables[at].shape[1] == whole.stop]
            return [Fit(index=at, columns=whole, error=0.0) for at in zeros]
        fits = self._find(value, self.fine, may_be_permuted=True)
        if not fits and not exactly:
            fits = self._find(value, LOOSE, may_be_permuted=False)
        return sorted(fits, key=lambda fit: fit.error)

    def _project(self, table: torch.Tensor) -> torch.Tensor:
        return self._probes @ table.double().nan_to_num(0.0, 0.0, 0.0)

    def _find(self, value: torch.Tensor, tolerance: float, *, may_be_permuted: bool) -> list[Fit]:
        projected, scale = self._project(value), scale_of(value)
        distance = scale * tolerance / len(value) ** 0.5
        begins = []
        for at in _samples(value):
            begins.append(self._begins(at, projected[:, at], float(distance[at])))
            if not begins[-1]:
                return []
        fits = []
        for index in sorted(set.intersection(*map(set, begins)))[:_MOST_TENSORS]:
            common = set.intersection(*(begin[index] for begin in begins))
            fit = self._side_by_side(index, common, value, scale, tolerance)
            if fit is None and may_be_permuted and (columns := self._permuted(index, projected, distance)) is not None:
                fit = self._fit(index, columns, value, scale)
            if fit is not None and fit.error <= tolerance:
                fits.append(fit)
        return fits

    def _begins(self, at: int, projected: torch.Tensor, distance: float) -> dict[int, set[int]]:
        """Return, by tensor, the columns at which the value may begin, given the columns near to its column `at`."""
        hits = self._near(projected, distance)
        begins: dict[int, set[int]] = {}
        for index, column in zip(self._owner[hits].tolist(), hits.tolist(), strict=True):
            begins.setdefault(index, set()).add(column - self._start[index] - at)
        return begins

    def _near(self, projected: torch.Tensor, distance: float) -> torch.Tensor:
        """Return the columns whose projections are all that near to some [P]."""
        reach = 4 * distance
        low, high = torch.searchsorted(self._sorted, torch.stack([projected[0] - reach, projected[0] + reach]))
        there = self._order[int(low) : int(high)]
        return there[(self._all[:, there] - projected[:, None]).abs().amax(dim=0) <= reach]

    def _side_by_side(
        self, index: int, begins: Set[int], value: torch.Tensor, scale: torch.Tensor, tolerance: float
    ) -> Fit | None:
        """Return where a tensor holds a value side by side, if it does so at one of some places."""
        width, room = value.shape[1], self._tables[index].shape[1]
        for at in [at for at in sorted(begins) if 0 <= at <= room - width][:4]:
            fit = self._fit(index, Columns(start=at, stop=at + width), value, scale)
            if fit.error <= tolerance:
                return fit
        return None

    def _fit(self, index: int, columns: Columns, value: torch.Tensor, scale: torch.Tensor) -> Fit:
        error = relative_error(columns.of(self._tables[index]), value, scale)
        return Fit(index=index, columns=columns, error=error)

    def _permuted(self, index: int, projected: torch.Tensor, distance: torch.Tensor) -> Columns | None:
        """Return the columns of a tensor that are each like one of a value's, in any order."""
        begin, end = self._start[index], self._start[index + 1]
        if end - begin < projected.shape[1]:
            return None
        columns, first = self._sorted_columns(index)
        reach = 4 * distance
        low, high = torch.searchsorted(first, torch.stack([projected[0] - reach, projected[0] + reach]))
        counts = high - low
        if bool((counts < 1).any()):
            return None
        elements = torch.repeat_interleave(counts)  # each with all columns whose first projections are near
        offsets = torch.arange(len(elements)) - (counts.cumsum(0) - counts)[elements]
        near = columns[low[elements] + offsets]
        gaps = (self._all[:, begin + near] - projected[:, elements]).abs().amax(dim=0)
        best = torch.full_like(reach, float("inf")).scatter_reduce(0, elements, gaps, "amin")
        if bool((best > reach).any()):
            return None
        nearest = torch.empty(len(reach), dtype=torch.int64)
        is_best = gaps == best[elements]
        nearest[elements[is_best]] = near[is_best]
        order = nearest.tolist()
        return (
            Columns(start=min(order), stop=max(order) + 1, order=tuple(order)) if len({*order}) == len(order) else None
        )

    def _sorted_columns(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor's columns in the order of their first projections, and these; both are kept."""
        if index not in self._sorted_of:
            first, columns = self._all[0, self._start[index] : self._start[index + 1]].sort()
            self._sorted_of[index] = columns, first
        return self._sorted_of[index]


def order_of_row(row: torch.Tensor, value: torch.Tensor, tolerance: float) -> tuple[int, ...] | None:
    """Return the column [W] of each element of a value [W] in a row that has these elements in another order.

    None if it has others, or the same order.
    """
    (sorted_row, columns), (sorted_value, elements) = row.sort(), value.sort()
    slack = tolerance * float(value.norm()) / len(value) ** 0.5
    if float((sorted_row - sorted_value).abs().max()) > 4 * slack or float(sorted_value.diff().min()) <= 0:
        return None
    order = torch.empty_like(columns)
    order[elements] = columns
    return None if bool((order.diff() > 0).all()) else tuple(order.tolist())


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """Return the RMS over columns of the error of [T, W] values, relative to each column and to what is usual.

    Args:
        actual: values.
        expected: values.
        scale: `scale_of` the expected ones, where they are compared with many.
    """
    expected = expected.double()
    scale = scale_of(expected) if scale is None else scale
    error = float(((actual.double() - expected) / scale.clamp_min(1e-300)).square().sum(dim=0).mean().sqrt())
    return error if error == error else float("inf")


def fine_limit(rounding: float) -> float:
    """Return the relative error up to which rounding may be all that differs."""
    return max(_LEAST_FINE, _FINE_ROUNDINGS * rounding)


def limit_of_same(error: float, rounding: float) -> float:
    """Return up to which error a tensor may be the value as well, where the nearest one's error is `error`."""
    return max(error * _SAME_FACTOR, error + _SAME_ROUNDINGS * rounding)


def scale_of(value: torch.Tensor) -> torch.Tensor:
    """Return [W]: of each column, its norm, and at least a tenth of what is usual."""
    norms = value.norm(dim=0)
    usual = norms[norms > 0].median() if bool((norms > 0).any()) else norms.new_ones(())
    scale: torch.Tensor = norms.clamp_min(float(usual) / 10)
    return scale


def _samples(value: torch.Tensor) -> list[int]:
    """Return the columns to look for: of those with much in them, some that are far apart."""
    order = value.norm(dim=0).argsort(descending=True)
    half = order[: max(1, (len(order) + 1) // 2)]
    picks = torch.linspace(0, len(half) - 1, min(_NUM_SAMPLES, len(half))).round().long()
    return list(dict.fromkeys(half[picks].tolist()))


_MOST_PADDING = 8
"""Rows that an engine adds to a small step, at most."""


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
        """Project the tables, each content once: modules, operators and views show the same values."""
        first_of: dict[bytes, int] = {}
        self.copy_of = [first_of.setdefault(_digest(table.rows), at) for at, table in enumerate(tables)]
        """By table, the first one that holds the same."""
        self._copies: dict[int, list[int]] = defaultdict(list)
        for at, first in enumerate(self.copy_of):
            self._copies[first].append(at)
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for at in self._copies:
            kept = tables[at].rows.isfinite().all(dim=1).nonzero()[:, 0].tolist()
            if len(kept) >= min(_LEAST_ROWS, len(tables[at].rows)):
                groups[tuple(kept)].append(at)
        self._groups = [
            (list(kept), places, ColumnIndex([_rows(tables[at], kept) for at in places], rounding=rounding))
            for kept, places in groups.items()
        ]
        self._told = {at for places in groups.values() for at in places}
        self.fine = fine_limit(rounding)
        """Relative error up to which a tensor is a value, to rounding."""

    def can_tell(self, table: int) -> bool:
        """Whether a table has finite rows that tell what it holds."""
        return self.copy_of[table] in self._told

    def find(self, value: torch.Tensor, *, exactly: bool = False) -> list[Fit]:
        """Return the tables that hold a value [T, W], as `ColumnIndex.find`."""
        fits = [
            replace(fit, index=at)
            for kept, places, index in self._groups
            for fit in index.find(value[kept], exactly=exactly)
            for at in self._copies[places[fit.index]]
        ]
        exact = [fit for fit in fits if fit.error <= self.fine]
        return sorted(exact or fits, key=lambda fit: (fit.error, fit.index))


def _digest(rows: torch.Tensor) -> bytes:
    return hashlib.blake2b(rows.float().numpy().tobytes(), digest_size=16).digest()


def _rows(table: Table, kept: Sequence[int]) -> torch.Tensor:
    """Return some rows; all of them without a copy."""
    return table.rows if len(kept) == len(table.rows) else table.rows[list(kept)]
