"""Tensors against tensors: how many values differ, by how much, and how much of a known update arrived.

Tensors are paired by name where the shapes are the same, else by content, as slices of rows or of columns: an engine
fuses query, key and value, and gate and up, or holds a shard of a tensor. `by_content/columns.py` finds such slices by
random projections. It finds a slice that is a little off, too: a stale slice is still meant to be the same.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.engines.by_content.columns import ColumnIndex, Columns
from harness.errors import some_of
from harness.judge.weights.settings import different_settings
from harness.judge.weights.sources import TensorSource
from harness.results.weights import TensorDifference, WeightsResult

_LOOSE = 0.1
"""Relative error up to which a slice of a vector counts as another vector."""
_MOST_NAMES = 4
"""Tensors under other names that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A whole tensor, and the tensor that equals it or contains it as a slice."""

    whole: str
    """Name of the tensor that is compared as a whole."""
    container: str
    """Name of the tensor that contains it."""
    is_expected: bool
    """Whether `whole` is one of the first weights."""
    columns: Columns | None = None
    """Where it is in `container`; None for all of it."""
    dim: int = 0
    """The dimension that `columns` counts: rows, or columns of a matrix."""

    def of(self, first: TensorSource, second: TensorSource) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tensors, the first weights' first."""
        source, container = (first, second) if self.is_expected else (second, first)
        whole, counterpart = source[self.whole], container[self.container]
        if self.columns is not None:
            lines = lines_of(counterpart, self.dim)
            part = self.columns.of(lines)
            whole = lines_of(whole, self.dim)
            counterpart = part.reshape(whole.shape)
        return (whole, counterpart) if self.is_expected else (counterpart, whole)

    def __str__(self) -> str:
        if self.columns is None:
            return self.container
        kind = "rows" if self.dim == 0 else "columns"
        rest = "" if self.columns.order is None else ", in another order"
        return f"{self.container}, {kind} {self.columns.start} to {self.columns.stop - 1}{rest}"


def match(first: TensorSource, second: TensorSource) -> tuple[list[Pair], list[str], list[str]]:
    """Return the pairs, and the names on either side that have no counterpart."""
    pairs = [
        Pair(whole=name, container=name, is_expected=True)
        for name, shape in first.shapes.items()
        if second.shapes.get(name) == shape
    ]
    named = {pair.whole for pair in pairs}
    left = [name for name in first.shapes if name not in named]
    right = [name for name in second.shapes if name not in named]
    pairs += _equal(first, left, second, right)
    named = {pair.whole for pair in pairs}
    left = [name for name in left if name not in named]
    right = [name for name in right if name not in {pair.container for pair in pairs}]
    slices = [*_search(first, left, second, right, is_expected=True)]
    left = [name for name in left if name not in {pair.whole for pair in slices}]
    rest = [name for name in right if name not in {pair.container for pair in slices}]
    back = [*_search(second, rest, first, left, is_expected=False)]
    rest = [name for name in rest if name not in {pair.whole for pair in back}]
    left = [name for name in left if name not in {pair.container for pair in back}]
    return [*pairs, *slices, *back], [*left, *_uncovered(back, first)], [*rest, *_uncovered(slices, second)]


def _equal(first: TensorSource, left: Sequence[str], second: TensorSource, right: Sequence[str]) -> Iterator[Pair]:
    """Pair equal tensors of different names; of several equal ones any pairing is right."""
    by_content: dict[tuple[object, ...], list[str]] = {}
    for name in right:
        by_content.setdefault(_content(second, name), []).append(name)
    for name in left:
        same = by_content.get(_content(first, name))
        if same:
            yield Pair(whole=name, container=same.pop(0), is_expected=True)


def _content(source: TensorSource, name: str) -> tuple[object, ...]:
    values = source[name].detach().cpu().double().contiguous().numpy().tobytes()
    return source.shapes[name], hashlib.sha256(values).digest()


def _uncovered(pairs: Sequence[Pair], container: TensorSource) -> Iterator[str]:
    """Yield tensors with lines that match no other tensor and are not padding of zeros."""
    for name in dict.fromkeys(pair.container for pair in pairs):
        slices = [pair for pair in pairs if pair.container == name and pair.columns is not None]
        lines = lines_of(container[name], slices[0].dim)
        is_open = torch.ones(lines.shape[1], dtype=torch.bool)
        for pair in slices:
            assert pair.columns is not None
            order = pair.columns.order
            is_open[list(order) if order is not None else slice(pair.columns.start, pair.columns.stop)] = False
        num_open = int((is_open & lines.cpu().bool().any(dim=0)).sum())
        if num_open:
            yield f"{name} ({num_open} of {lines.shape[1]} {'rows' if slices[0].dim == 0 else 'columns'})"


def _search(
    source: TensorSource, names: Sequence[str], container: TensorSource, others: Sequence[str], *, is_expected: bool
) -> Iterator[Pair]:
    """Find the tensors that are slices of the others."""
    open_names = dict.fromkeys(names)
    for dim in (0, 1):
        tables: dict[int, list[str]] = {}
        for candidate in others:
            shape = container.shapes[candidate]
            if len(shape) > dim:
                tables.setdefault(_width(shape, dim), []).append(candidate)
        for width, containers in tables.items():
            wanted = [
                name for name in open_names
                if len(source.shapes[name]) == (1 if width == 1 else len(source.shapes[name]))
                and len(source.shapes[name]) > dim and _width(source.shapes[name], dim) == width
            ]  # fmt: skip
            if not wanted:
                continue
            for name, fit in _fits(source, wanted, container, containers, dim, width):
                del open_names[name]
                yield Pair(whole=name, container=fit[0], is_expected=is_expected, columns=fit[1], dim=dim)


def _fits(
    source: TensorSource, wanted: Sequence[str], container: TensorSource, others: Sequence[str], dim: int, width: int
) -> Iterator[tuple[str, tuple[str, Columns]]]:
    lines = [lines_of(container[candidate], dim).float() for candidate in others]
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
    """Return the place where a vector is a slice of another one; None for a constant, which fits everywhere."""
    size, fits = len(value), []
    for at, line in enumerate(lines):
        if len(line) >= size and bool(value.any()) and bool(value.std() > 0):
            errors = (line.unfold(0, size, 1) - value).norm(dim=1) / value.norm()
            fits += [(float(errors[begin]), at, begin) for begin in (errors <= _LOOSE).nonzero()[:, 0].tolist()]
    if not fits:
        return None
    _, at, begin = min(fits)
    return at, Columns(start=begin, stop=begin + size)


def _width(shape: Sequence[int], dim: int) -> int:
    """Return the length of a line of a tensor: inputs for its rows, outputs for its columns, 1 for a vector."""
    if len(shape) == 1:
        return 1
    return int(shape[-1]) if dim == 0 else int(torch.Size(shape[:-1]).numel())


def lines_of(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [width, lines]: the rows of a tensor as columns, or its columns."""
    if tensor.dim() <= 1:
        return tensor.reshape(1, -1)
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat.t() if dim == 0 else flat


def compare_weights(first: Any, second: Any, *, before: Any = None, local_files_only: bool = True) -> WeightsResult:
    """Compare two sets of weights.

    Args:
        first: the weights that are right: a checkpoint's folder, a module, or tensors by name.
        second: the weights under test.
        before: earlier weights with the names of the first: the update is the difference.
        local_files_only: never ask the model hub.

    Raises:
        HarnessError: BAD_OPTION, or what is wrong with a checkpoint.
    """
    one, two = (
        TensorSource.of(weights, where=where, local_files_only=local_files_only)
        for weights, where in ((first, "the first weights"), (second, "the second weights"))
    )
    old = None if before is None else TensorSource.of(before, where="before", local_files_only=local_files_only)
    settings, not_compared = different_settings(one.folder, two.folder)
    pairs, only_first, only_second = match(one, two)
    _drop_tied(one, two, only_first, only_second)
    moves = [f"{pair.whole} is {pair}" for pair in pairs if str(pair) != pair.whole]
    if moves:
        what = f"the places of tensors that were found by their values under other names ({len(moves)})"
        not_compared += (f"{what}: {some_of(moves, _MOST_NAMES)}",)
    tensors, moved, total = [], 0.0, 0.0
    for pair in pairs:
        difference, dot, norm = _difference(pair, one, two, old)
        tensors.append(difference)
        moved, total = moved + dot, total + norm
    return WeightsResult(
        first=one.name,
        second=two.name,
        tensors=tuple(tensors),
        only_first=tuple(only_first),
        only_second=tuple(only_second),
        arrived=moved / total if total else None,
        settings=settings,
        not_compared=not_compared,
    )


def _drop_tied(one: TensorSource, two: TensorSource, only_first: list[str], only_second: list[str]) -> None:
    """Remove a head from the names without a counterpart if the other side is tied: it equals the embedding."""
    for names, source in ((only_first, one), (only_second, two)):
        for name in [name for name in names if name.endswith("lm_head.weight")]:
            same = (
                candidate
                for candidate, shape in source.shapes.items()
                if candidate != name and shape == source.shapes[name]
            )
            if any(torch.equal(source[candidate], source[name]) for candidate in same):
                names.remove(name)


def _difference(
    pair: Pair, one: TensorSource, two: TensorSource, old: TensorSource | None
) -> tuple[TensorDifference, float, float]:
    """Return a pair's difference, and two dot products of the known update: the part that arrived, and the whole."""
    first, second = (tensor.detach().cpu() for tensor in pair.of(one, two))
    a, b = first.double(), second.double()
    gap = (a - b).abs()
    apart = a != b
    if first.dtype != second.dtype:
        size = torch.maximum(a.abs(), b.abs())
        kinds = [torch.finfo(item.dtype) for item in (first, second) if item.is_floating_point()]
        apart &= gap > sum(kind.eps / 2 * size.clamp(min=kind.tiny) for kind in kinds)
    apart |= a.isnan() | b.isnan()  # on both sides, too: nothing can be computed with them
    dot, norm = _update(pair, a, b, old)
    difference = TensorDifference(
        name=pair.whole,
        counterpart=str(pair),
        dtypes=(_name(first), _name(second)),
        digests=(_digest(first), _digest(second)),
        num_values=a.numel(),
        num_different=int(apart.sum()),
        max_abs=float(gap.nan_to_num(torch.inf).max()) if a.numel() else 0.0,
        relative=float(gap.nan_to_num(0.0).norm() / a.nan_to_num(0.0).norm().clamp(min=1e-30)),
        arrived=dot / norm if norm else None,
    )
    return difference, dot, norm


def _update(pair: Pair, a: torch.Tensor, b: torch.Tensor, old: TensorSource | None) -> tuple[float, float]:
    name = pair.whole if pair.is_expected else pair.container
    if old is None or name not in old.shapes:
        return 0.0, 0.0
    earlier = old[name].double().cpu()
    if pair.columns is not None:
        earlier = lines_of(earlier, pair.dim)
        earlier = earlier if pair.is_expected else pair.columns.of(earlier)
    if earlier.numel() != a.numel():
        return 0.0, 0.0
    earlier = earlier.reshape(a.shape)
    update = a - earlier
    return float(((b - earlier) * update).sum()), float(update.square().sum())


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_zeros(0)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
