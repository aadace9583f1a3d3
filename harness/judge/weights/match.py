"""Which tensor is which: by name where the shapes are the same, else by content, as slices of rows or of columns.

An engine fuses query, key and value, and gate and up, or holds a shard of a tensor. `columns.py` finds such slices by
random projections; a slice that is a little off is found, too: a stale one is meant to be the same.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.engines.by_content.columns import ColumnIndex, Columns
from harness.judge.weights.sources import TensorSource

_LOOSE = 0.1
"""Relative error up to which a slice of a vector is taken for another vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tensor, whole, and the tensor that it is, or the slice of it."""

    whole: str
    """Name of the tensor that is compared as a whole."""
    other: str
    """Name of the tensor that has it."""
    is_expected: bool
    """Whether `whole` is one of the first weights."""
    columns: Columns | None = None
    """Where it is in `other`; None for all of it."""
    dim: int = 0
    """The dimension that `columns` counts: rows, or columns of a matrix."""

    def of(self, first: TensorSource, second: TensorSource) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tensors, the first weights' first."""
        source, container = (first, second) if self.is_expected else (second, first)
        whole, other = source[self.whole], container[self.other]
        if self.columns is not None:
            own = lines_of(other, self.dim)
            part = self.columns.of(own)
            whole = lines_of(whole, self.dim)
            other = part.reshape(whole.shape)
        return (whole, other) if self.is_expected else (other, whole)

    def __str__(self) -> str:
        if self.columns is None:
            return self.other
        kind = "rows" if self.dim == 0 else "columns"
        rest = "" if self.columns.order is None else ", in another order"
        return f"{self.other}, {kind} {self.columns.start} to {self.columns.stop - 1}{rest}"


def match(first: TensorSource, second: TensorSource) -> tuple[list[Pair], list[str], list[str]]:
    """Return the pairs, and the names on either side that have no counterpart."""
    pairs = [
        Pair(whole=name, other=name, is_expected=True)
        for name, shape in first.shapes.items()
        if second.shapes.get(name) == shape
    ]
    named = {pair.whole for pair in pairs}
    left = [name for name in first.shapes if name not in named]
    right = [name for name in second.shapes if name not in named]
    pairs += _equal(first, left, second, right)
    named = {pair.whole for pair in pairs}
    left = [name for name in left if name not in named]
    right = [name for name in right if name not in {pair.other for pair in pairs}]
    found = [*_search(first, left, second, right, is_expected=True)]
    left = [name for name in left if name not in {pair.whole for pair in found}]
    rest = [name for name in right if name not in {pair.other for pair in found}]
    back = [*_search(second, rest, first, left, is_expected=False)]
    rest = [name for name in rest if name not in {pair.whole for pair in back}]
    left = [name for name in left if name not in {pair.other for pair in back}]
    return [*pairs, *found, *back], [*left, *_uncovered(back, first)], [*rest, *_uncovered(found, second)]


def _equal(first: TensorSource, left: Sequence[str], second: TensorSource, right: Sequence[str]) -> Iterator[Pair]:
    """Pair tensors of other names that are equal: of several equal ones it does not matter which is which."""
    by_content: dict[tuple[object, ...], list[str]] = {}
    for name in right:
        by_content.setdefault(_content(second, name), []).append(name)
    for name in left:
        same = by_content.get(_content(first, name))
        if same:
            yield Pair(whole=name, other=same.pop(0), is_expected=True)


def _content(source: TensorSource, name: str) -> tuple[object, ...]:
    values = source[name].detach().cpu().double().contiguous().numpy().tobytes()
    return source.shapes[name], hashlib.sha256(values).digest()


def _uncovered(pairs: Sequence[Pair], container: TensorSource) -> Iterator[str]:
    """Yield tensors of which some lines were found nowhere, and are no padding: not all zero."""
    for name in dict.fromkeys(pair.other for pair in pairs):
        own = [pair for pair in pairs if pair.other == name and pair.columns is not None]
        lines = lines_of(container[name], own[0].dim)
        is_open = torch.ones(lines.shape[1], dtype=torch.bool)
        for pair in own:
            assert pair.columns is not None
            order = pair.columns.order
            is_open[list(order) if order is not None else slice(pair.columns.start, pair.columns.stop)] = False
        num_open = int((is_open & lines.cpu().bool().any(dim=0)).sum())
        if num_open:
            yield f"{name} ({num_open} of {lines.shape[1]} {'rows' if own[0].dim == 0 else 'columns'})"


def _search(
    source: TensorSource, names: Sequence[str], container: TensorSource, others: Sequence[str], *, is_expected: bool
) -> Iterator[Pair]:
    """Find tensors in others, of which they may be slices."""
    open_names = dict.fromkeys(names)
    for dim in (0, 1):
        tables: dict[int, list[str]] = {}
        for other in others:
            shape = container.shapes[other]
            if len(shape) > dim:
                tables.setdefault(_width(shape, dim), []).append(other)
        for width, own in tables.items():
            wanted = [
                name for name in open_names
                if len(source.shapes[name]) == (1 if width == 1 else len(source.shapes[name]))
                and len(source.shapes[name]) > dim and _width(source.shapes[name], dim) == width
            ]  # fmt: skip
            if not wanted:
                continue
            for name, fit in _fits(source, wanted, container, own, dim, width):
                del open_names[name]
                yield Pair(whole=name, other=fit[0], is_expected=is_expected, columns=fit[1], dim=dim)


def _fits(
    source: TensorSource, wanted: Sequence[str], container: TensorSource, others: Sequence[str], dim: int, width: int
) -> Iterator[tuple[str, tuple[str, Columns]]]:
    lines = [lines_of(container[other], dim).float() for other in others]
    index = None if width == 1 else ColumnIndex(lines, rounding=torch.finfo(torch.bfloat16).eps / 4)
    for name in wanted:
        value = lines_of(source[name], dim).float()
        if index is None:
            fit = _vector(value[0], [line[0] for line in lines])
            if fit is not None:
                yield name, (others[fit[0]], fit[1])
        elif fits := index.find(value):
            yield name, (others[fits[0].index], fits[0].columns)


def _vector(value: torch.Tensor, lines: Sequence[torch.Tensor]) -> tuple[int, Columns] | None:
    """Return where a vector is a slice of another one, if that is one place alone; a constant is everywhere."""
    size, found = len(value), []
    for at, line in enumerate(lines):
        if len(line) >= size and bool(value.any()) and bool(value.std() > 0):
            errors = (line.unfold(0, size, 1) - value).norm(dim=1) / value.norm()
            found += [(float(errors[begin]), at, begin) for begin in (errors <= _LOOSE).nonzero()[:, 0].tolist()]
    if not found:
        return None
    _, at, begin = min(found)
    return at, Columns(start=begin, stop=begin + size)


def _width(shape: Sequence[int], dim: int) -> int:
    """Return what a line of a tensor has: inputs for its rows, outputs for its columns, 1 for a vector."""
    if len(shape) == 1:
        return 1
    return int(shape[-1]) if dim == 0 else int(torch.Size(shape[:-1]).numel())


def lines_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [width, lines]: a tensor whose columns are its rows, or its columns."""
    if tensor.dim() <= 1:
        return tensor.reshape(1, -1)
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat.t() if dim == 0 else flat
