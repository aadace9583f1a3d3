"""A trace's times by layer, by operation and by operator; what has no name is a row of its own."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from harness.profiling.span_names import layer_of, site_of
from harness.profiling.trace.nodes import Node, TraceEvents
from harness.results.profile import TableRow

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTables:
    """The tables of one phase."""

    wall_us: float
    attributed_share: float
    layers: tuple[TableRow, ...]
    operations: tuple[TableRow, ...]
    operators: tuple[TableRow, ...]


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    total_us: float = 0.0
    self_us: float = 0.0
    device_us: float = 0.0

    def add(self, node: Node, self_us: float) -> None:
        self.join(_Sum(1, node.duration, self_us, sum(inner.device_us for inner in node.walk())))

    def join(self, other: "_Sum") -> None:
        self.calls += other.calls
        self.total_us += other.total_us
        self.self_us += other.self_us
        self.device_us += other.device_us


@dataclass(slots=True)
class _Layer:
    """One decoder layer over all steps."""

    name: str
    sum: _Sum = field(default_factory=_Sum)
    operators: Counter[str] = field(default_factory=Counter)
    """How often each operator ran. Two layers are identical if these are equal."""


def tables(events: TraceEvents, names: Collection[str]) -> PhaseTables:
    """Build the tables of a trace."""
    layer_names = {layer for name in names if (layer := layer_of(name)) is not None}
    nodes = [node for step in events.steps for node in step.walk()]
    wall_us = sum(step.duration for step in events.steps)
    spans = [node for node in nodes if node.name in names]
    attributed_us = sum(node.duration for node in spans)
    make = _RowMaker(wall_us, events.has_device)
    layers = _layer_rows(nodes, layer_names, names, make)
    num_steps = len(events.steps)
    return PhaseTables(
        wall_us=wall_us,
        attributed_share=attributed_us / wall_us,
        layers=(*layers, make.unattributed(num_steps, wall_us - sum(row.total_us for row in layers))),
        operations=(*make.rows(_by_site(spans)), make.unattributed(num_steps, wall_us - attributed_us)),
        operators=tuple(
            sorted(make.rows(_by_operator(nodes, {*names, *layer_names})), key=lambda row: row.self_us, reverse=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class _RowMaker:
    wall_us: float
    has_device: bool

    def row(
        self, name: str, found: _Sum, spread: tuple[float, float] | None = None, num_collapsed: int = 1
    ) -> TableRow:
        return TableRow(
            name=name,
            calls=found.calls,
            total_us=found.total_us,
            self_us=found.self_us,
            share=found.self_us / self.wall_us,
            num_collapsed=num_collapsed,
            spread=spread,
            device_us=found.device_us if self.has_device else None,
        )

    def rows(self, sums: dict[str, _Sum]) -> list[TableRow]:
        return [self.row(name, found) for name, found in sums.items()]

    def unattributed(self, num_steps: int, time_us: float) -> TableRow:
        return self.row(UNATTRIBUTED, _Sum(calls=num_steps, total_us=time_us, self_us=time_us))


def _by_site(spans: Iterable[Node]) -> dict[str, _Sum]:
    sums: dict[str, _Sum] = {}
    for node in spans:
        sums.setdefault(site_of(node.name), _Sum()).add(node, node.duration)
    return sums


def _by_operator(nodes: Iterable[Node], ours: Collection[str]) -> dict[str, _Sum]:
    """Sum up dispatched operators, every event of them, their time without that of operators in them."""
    sums: dict[str, _Sum] = {}
    for node in nodes:
        if _is_operator(node, ours):
            nested = sum(child.duration for child in node.children if _is_operator(child, ours))
            sums.setdefault(node.name, _Sum()).add(node, node.duration - nested)
    return sums


def _is_operator(node: Node, ours: Collection[str]) -> bool:
    return node.category == "cpu_op" and node.name not in ours and "::" in node.name


def _layer_rows(
    nodes: Iterable[Node], layer_names: Collection[str], names: Collection[str], make: _RowMaker
) -> list[TableRow]:
    """Return a row for each group of identical consecutive layers, and for each operation outside of all layers."""
    found: dict[str, _Layer] = {}
    for node in nodes:
        if node.name in layer_names or (node.name in names and layer_of(node.name) is None):
            layer = found.setdefault(node.name, _Layer(node.name))
            layer.sum.add(node, node.duration)
            layer.operators.update(inner.name for inner in node.walk() if _is_operator(inner, names))
    rows = []
    for _, group in groupby(found.values(), key=lambda layer: (layer.name in layer_names, layer.operators)):
        layers = list(group)
        if layers[0].name in layer_names:
            rows.append(_collapsed(layers, make))
        else:
            rows += [make.row(layer.name, layer.sum) for layer in layers]
    return rows


def _collapsed(layers: list[_Layer], make: _RowMaker) -> TableRow:
    total = _Sum()
    for layer in layers:
        total.join(layer.sum)
    times = [layer.sum.total_us for layer in layers]
    last = layers[-1].name.rpartition(".")[2]
    name = layers[0].name if len(layers) == 1 else f"{layers[0].name}-{last}"
    return make.row(name, total, spread=(min(times), max(times)), num_collapsed=len(layers))
