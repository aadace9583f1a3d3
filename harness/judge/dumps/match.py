"""Which tensors of two folders are one quantity: by content, then by names, then by their place in the run.

Content decides alone where two tensors are each other's only near one. Names and places are hints: they choose among
tensors that are equally near, and pair those that are near to none, since a wrong value is near to nothing. A hint
counts as far as the pairs that content matched agree with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from harness.base.metrics import rounding_unit
from harness.engines.by_content.columns import LOOSE, fine_limit, limit_of_same
from harness.formats.tensors import TensorFolder
from harness.judge.dumps.fingerprint import AS_IT_IS, Fingerprint, Layout, sample
from harness.judge.dumps.names import NameHints
from harness.results.dumps import PairEvidence

_FIRST_SAMPLES, _LEAST_NEAR = 32, 0.3
"""Samples that are compared first, and the share of them that must be near."""
_LEAST_VALUES = 16
"""Samples of a pair that are not both zero, without which content decides nothing."""
_MOST_EDGES = 32
"""Of one tensor, the nearest: a folder may hold thousands that are alike."""
_LEAST_IN_ORDER = 0.9
"""Share of the pairs that follow each other in both folders, for places to be hints."""
_MOST_PADDED_COLUMNS = 1.25
"""Ratio of two last dimensions up to which the longer one is padded; a fused projection is longer."""
_AS_THEY_ARE, _EXCHANGED, _IN_PART, _LOOSELY, _BY_NAME = range(5)
"""Levels of edges, from the best to the worst: near to rounding in three ways, less near, or not."""

Side = Mapping[str, Fingerprint]
"""The tensors of a folder in the order of the run."""
View = tuple[Fingerprint, Layout, torch.Tensor]
"""A tensor in a layout, and samples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Two tensors that may be one quantity."""

    tensors: tuple[Fingerprint, Fingerprint]
    layouts: tuple[Layout, Layout] = (AS_IT_IS, AS_IT_IS)
    distance: float = 0.0
    """Median relative difference of the elements."""
    level: int = _BY_NAME
    evidence: PairEvidence = PairEvidence.NAME

    @property
    def names(self) -> tuple[str, str]:
        """Of both tensors."""
        return self.tensors[0].name, self.tensors[1].name

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """Of both tensors."""
        return self.tensors[0].digest, self.tensors[1].digest

    @property
    def unit(self) -> float:
        """One rounding of the coarser precision."""
        return max(rounding_unit(tensor.precision) for tensor in self.tensors)

    @property
    def is_flattening(self) -> bool:
        """Whether one view is the other with dimensions flattened; exchanged, it has to have another shape."""
        first, second = (layout.ends(item.shape) for layout, item in zip(self.layouts, self.tensors, strict=True))
        squeezed = [[size for size in item.shape if size > 1] for item in self.tensors]
        is_told = self.layouts == (AS_IT_IS, AS_IT_IS) or squeezed[0] != squeezed[1]
        return is_told and (first <= second or second <= first)

    @property
    def is_fine(self) -> bool:
        """Whether rounding may be all that differs."""
        return self.level < _LOOSELY


class Matcher:
    """Matches the tensors of two folders."""

    def __init__(self, sides: tuple[Side, Side], hints: NameHints) -> None:
        """Take the tensors."""
        self.sides, self._hints = sides, hints
        self._edges: list[Edge] = []
        self.pairs: list[Edge] = []

    def run(self, folders: tuple[TensorFolder, TensorFolder]) -> None:
        """Find the pairs; raises as `TensorFolder.read`."""
        self._edges = list(_edges(*(side.values() for side in self.sides)))
        self._take(_AS_THEY_ARE)
        self._take(_EXCHANGED)
        self._edges += _part_edges(folders, (self.left(0), self.left(1)))
        self._take(_IN_PART)
        self._take(_LOOSELY, by_name=True)
        self._edges += self._named()
        self._take(_BY_NAME, by_name=True)
        self._take_placed()

    def left(self, side: int) -> list[Fingerprint]:
        """Return the tensors of a folder without a partner."""
        taken = {edge.names[side] for edge in self.pairs}
        return [tensor for name, tensor in self.sides[side].items() if name not in taken]

    def ambiguous(self) -> list[str]:
        """Return the tensors without a partner that are near to others without one."""
        near = [edge for edge in self._open() if edge.level < _BY_NAME]
        return list(dict.fromkeys(name for edge in near for name in edge.names))

    def after(self, pairs: Iterable[Edge]) -> list[list[Fingerprint]] | None:
        """Return, of each folder, the tensors without a partner that come after some pairs; None without an order."""
        places = [{name: at for at, name in enumerate(names)} for names in self.sides]
        line = sorted((places[0][edge.names[0]], places[1][edge.names[1]]) for edge in pairs)
        num_in_order = sum(one[1] < two[1] for one, two in pairwise(line))
        if num_in_order < _LEAST_IN_ORDER * (len(line) - 1):
            return None
        last = [max((at[side] for at in line), default=-1) for side in (0, 1)]
        return [[item for item in self.left(side) if places[side][item.name] > last[side]] for side in (0, 1)]

    def _open(self) -> list[Edge]:
        """Return the edges between tensors without a partner."""
        left = [{tensor.name for tensor in self.left(side)} for side in (0, 1)]
        return [
            edge for edge in self._edges if all(name in names for name, names in zip(edge.names, left, strict=True))
        ]

    def _named(self) -> Iterator[Edge]:
        """Yield the pairs without a partner whose names may agree, and whose shapes do but for flattened dimensions."""
        second = defaultdict(list)
        for two in self.left(1):
            second[two.shape.numel()].append(two)
        for one in self.left(0):
            for two in second[one.shape.numel()]:
                edge = Edge(tensors=(one, two))
                if self._hints.likeness(edge.names) and edge.is_flattening:
                    yield edge

    def _take(self, level: int, *, by_name: bool = False) -> None:
        """Take the edges of a level that are better than their rivals, those between names that agree first.

        Near to rounding, names choose only among what content leaves open, such as copies.
        """
        edges = [edge for edge in self._open() if edge.level == level]
        concerned = {key for edge in edges for key in enumerate(edge.names)}
        near = [edge for edge in self._edges if edge.level <= level and not concerned.isdisjoint(enumerate(edge.names))]
        likeness = {edge.names: by_name * self._hints.likeness(edge.names) for edge in near}
        rivals: dict[tuple[int, str], dict[object, Edge]] = defaultdict(dict)
        for edge in sorted(near, key=lambda edge: likeness[edge.names]):
            for key in enumerate(edge.names):
                rivals[key][edge.digests if by_name else edge.names] = edge  # of copies, that of the best name

        def is_better(edge: Edge, rival: Edge) -> bool:
            ours, theirs = likeness[edge.names], likeness[rival.names]
            is_nearer = rival.distance > limit_of_same(edge.distance, edge.unit)
            return edge.names == rival.names or ours > theirs or (is_nearer and (level < _LOOSELY or ours == theirs))

        taken: set[tuple[int, str]] = set()
        for edge in sorted(edges, key=lambda edge: -likeness[edge.names]):
            keys = {*enumerate(edge.names)}
            if not keys & taken and all(is_better(edge, rival) for key in keys for rival in rivals[key].values()):
                taken |= keys
                self.pairs.append(edge)
                if edge.is_fine:
                    self._hints.learn(edge.names)
        if edges and not by_name:
            self._take(level, by_name=True)

    def _take_placed(self) -> None:
        """Pair the tensors after all pairs that are near to rounding, where numbers and shapes of them agree.

        Before those, what is near to nothing is another quantity: a wrong value would make all that follows wrong.
        """
        fine = [edge for edge in self.pairs if edge.is_fine]
        rest: dict[tuple[int, ...], tuple[list[Fingerprint], list[Fingerprint]]] = defaultdict(lambda: ([], []))
        for side, tensors in enumerate(self.after(fine) or ()):
            for tensor in tensors:
                rest[tuple(size for size in tensor.shape if size > 1)][side].append(tensor)
        near = {edge.names for edge in self._open() if edge.level < _BY_NAME}
        several = {key for names in near for key in enumerate(names)}
        for ones, twos in rest.values():
            for pair in zip(ones, twos, strict=True) if len(ones) == len(twos) else ():
                edge = Edge(tensors=pair, evidence=PairEvidence.PLACE)
                if edge.names in near or not several & {*enumerate(edge.names)}:
                    self.pairs.append(edge)


def _edges(first: Iterable[Fingerprint], second: Iterable[Fingerprint]) -> Iterator[Edge]:
    """Yield the pairs of tensors with as many elements that are near to each other, each in the best layout."""
    views: dict[int, list[View]] = defaultdict(list)
    for two in second:
        views[two.shape.numel()] += [(two, layout, values) for layout, values in two.samples.items() if two.is_telling]
    tables = {size: _Table(theirs) for size, theirs in views.items() if theirs}
    as_they_are = {size: _Table([view for view in views[size] if view[1] == AS_IT_IS]) for size in tables}
    for one in first:
        size = one.shape.numel()
        if not one.is_telling or size not in tables:
            continue
        edges = list(tables[size].near((one, AS_IT_IS, one.samples[AS_IT_IS])))
        for layout, values in one.samples.items():
            edges += as_they_are[size].near((one, layout, values))
        best: dict[tuple[str, str], Edge] = {}
        for edge in sorted(edges, key=lambda edge: (edge.level, edge.distance)):
            best.setdefault(edge.names, edge)
        yield from best.values()


class _Table:
    """Views whose samples lie side by side."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self._samples = torch.stack([values for _tensor, _layout, values in views])  # [views, samples]

    def near(self, one: View) -> Iterator[Edge]:
        """Yield the edges between a view and the nearest of these that are near to it."""
        first = _relative(one[2][:_FIRST_SAMPLES], self._samples[:, :_FIRST_SAMPLES])
        places = ((first <= LOOSE).sum(dim=1) >= _LEAST_NEAR * first.isfinite().sum(dim=1)).nonzero()[:, 0]
        differences = _relative(one[2], self._samples[places])
        distances = differences.nanmedian(dim=1).values
        distances[differences.isfinite().sum(dim=1) < _LEAST_VALUES] = torch.inf
        order = distances.argsort()[:_MOST_EDGES]
        for place, distance in zip(places[order].tolist(), distances[order].tolist(), strict=True):
            tensor, layout, _values = self._views[place]
            layouts = one[1], layout
            edge = Edge(tensors=(one[0], tensor), layouts=layouts, distance=distance, evidence=PairEvidence.CONTENT)
            fine = _IN_PART if layout.part else _AS_THEY_ARE if layouts == (AS_IT_IS, AS_IT_IS) else _EXCHANGED
            if distance <= LOOSE and edge.is_flattening:
                is_fine = distance <= fine_limit(edge.unit)
                yield replace(edge, level=fine if is_fine else _LOOSELY)


def _relative(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return relative differences; NaN where both are zero or one is not finite."""
    return (values - table).abs() / torch.maximum(values.abs(), table.abs())


def _part_edges(folders: Sequence[TensorFolder], left: Sequence[Sequence[Fingerprint]]) -> Iterator[Edge]:
    """Yield the pairs of which one tensor is the begin or the end of the other: padding, or the last token's row."""
    for side in (0, 1):
        shorter: dict[int, list[Fingerprint]] = defaultdict(list)
        for tensor in left[1 - side]:
            if tensor.is_telling:
                shorter[tensor.shape.numel()].append(tensor)
        for tensor in left[side]:
            parts = [(size, layout) for size in shorter for layout in _parts(tensor.shape, size)]
            values = folders[side].read(tensor.name) if parts else torch.empty(0)
            views: dict[int, list[View]] = defaultdict(list)
            for size, layout in parts:
                views[size].append((tensor, layout, sample(layout.of(values))))
            for size, theirs in views.items():
                for item in shorter[size]:
                    edges = _Table(theirs).near((item, AS_IT_IS, item.samples[AS_IT_IS]))
                    if (edge := min(edges, key=lambda edge: edge.distance, default=None)) is not None:
                        turned = replace(edge, tensors=edge.tensors[::-1], layouts=edge.layouts[::-1])
                        yield edge if side else turned


def _parts(shape: torch.Size, size: int) -> Iterator[Layout]:
    """Yield the begins and ends of a tensor that have `size` elements."""
    for dim, length in enumerate(shape):
        part, rest = divmod(size * length, shape.numel())
        is_fused = dim == len(shape) - 1 and length > _MOST_PADDED_COLUMNS * part
        if not rest and 0 < part < length and not is_fused:
            yield from (Layout(part=(dim, start, part)) for start in (0, length - part))
