"""The trace that a profile has written: its events as a tree, and times by layer, operation and operator.

Time without a name is a row of its own. The names of spans stand here too, where writers and readers share them; none
of this needs torch.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.base.memory import collecting_no_garbage
from harness.errors import Code, HarnessError
from harness.profiling.trace.columns import NO_CORRELATION, Trace
from harness.profiling.trace.file import read_trace
from harness.results.profile import TableRow

STEP = "engine.step"
"""Span of a whole step, inside of the annotation that carries its shape: the annotation's own cost, some 40 us at
either end, is left out of it."""
SPAN = re.compile(r"(?:(?:engine|model)\.[\w.]+|lm_head)$")
"""Names of the spans: annotations in a trace of now, of the same category as operators in one of before."""


def layer_of(name: str) -> str | None:
    """Return `model.layers.3` of `model.layers.3.mlp.act`, and None for what is in no layer."""
    parts = name.split(".", 3)
    return ".".join(parts[:3]) if len(parts) == 4 and parts[:2] == ["model", "layers"] else None


def site_of(name: str) -> str:
    """Return `mlp.act` of `model.layers.3.mlp.act`, and the name itself of what is in no layer."""
    layer = layer_of(name)
    return name if layer is None else name.removeprefix(f"{layer}.")


_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}
_CPU_CATEGORIES = {"cpu_op", "python_function", *_LAUNCH_CATEGORIES}


@dataclass(slots=True, eq=False)
class Node:
    """One event with what is nested in it. Times in microseconds."""

    name: str
    category: str
    start: float
    duration: float
    parent: "Node | None" = None
    children: "list[Node]" = field(default_factory=list)
    device_us: float = 0.0
    """Of the kernels launched by this very event."""

    def walk(self) -> "Iterator[Node]":
        """Yield the event and everything in it, in order of time."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))

    def around(self, time_us: float) -> "Iterator[Node]":
        """Yield the event and those that it is nested in, as far as they last beyond `time_us`, the innermost first.

        A span that begins in one Python function and ends in another is nested in what has ended before it has.
        """
        node: Node | None = self
        while node is not None:
            if node.start + node.duration > time_us:
                yield node
            node = node.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """One allocation or free."""

    time_us: float
    address: int
    num_bytes: int
    """Negative for a free."""
    within: Node | None
    """The innermost event it happened in."""
    device: int = -1
    """Number of the GPU; -1 for the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvents:
    """The events of the engine's own thread."""

    steps: tuple[Node, ...]
    """The spans of whole steps."""
    memory: tuple[MemoryEvent, ...]
    has_device: bool
    """Whether there are GPU kernels."""


def read_events(path: Path) -> TraceEvents:
    """Read a trace of ours.

    Raises:
        HarnessError: PROFILER_FAILED: it cannot be read, or holds no step.
    """
    try:
        with collecting_no_garbage():
            trace = read_trace(path)
    except HarnessError as error:
        raise HarnessError(Code.PROFILER_FAILED, f"the trace cannot be read: {error.what}", where=path) from error
    is_cpu = trace.are(_is_on_cpu)
    is_step = trace.are(lambda _, name: name == STEP)
    # A GPU's stream may show the span again, in a category of its own.
    steps = np.flatnonzero(is_cpu & is_step)
    if not len(steps):
        raise HarnessError(Code.PROFILER_FAILED, "the trace holds no step", where=path)
    thread = int(trace.thread[steps[0]])
    memory: list[MemoryEvent] = []
    nodes = _tree(trace, np.flatnonzero(is_cpu & (trace.thread == thread)), thread, memory)
    has_device = _charge_kernels(trace, nodes)
    return TraceEvents(
        steps=tuple(node for node, _ in nodes if node.name == STEP), memory=tuple(memory), has_device=has_device
    )


def memory_events(trace: Trace) -> list[MemoryEvent]:
    """Return the allocations and frees of all threads of any trace, in order of time."""
    is_cpu = trace.are(lambda category, _: category in _CPU_CATEGORIES)
    events: list[MemoryEvent] = []
    for thread in np.unique(trace.memory.thread).tolist():
        _tree(trace, np.flatnonzero(is_cpu & (trace.thread == thread)), thread, events)
    return sorted(events, key=lambda event: event.time_us)


def _is_on_cpu(category: str, name: str) -> bool:
    """Whether an event is one of the tree: annotations are if they are spans of ours."""
    return category in _CPU_CATEGORIES or (category == "user_annotation" and bool(SPAN.match(name)))


def _tree(trace: Trace, events: NDArray[np.int64], thread: int, memory: list[MemoryEvent]) -> list[tuple[Node, int]]:
    """Nest the events of one thread by time; return them with what links their kernels to them, -1 for nothing."""
    memory_rows = np.flatnonzero(trace.memory.thread == thread)
    starts = np.concatenate([trace.start_ns[events], trace.memory.time_ns[memory_rows]])
    durations = np.concatenate([trace.duration_ns[events], np.zeros(len(memory_rows), np.int64)])
    nodes: list[tuple[Node, int]] = []
    around: Node | None = None
    starts_us, durations_us = (starts / 1e3).tolist(), (durations / 1e3).tolist()
    for place in np.lexsort((-durations, starts)).tolist():
        start_us = starts_us[place]
        while around is not None and around.start + around.duration <= start_us:
            around = around.parent
        if place >= len(events):
            at = memory_rows[place - len(events)]
            memory.append(
                MemoryEvent(
                    time_us=start_us,
                    address=int(trace.memory.address[at]),
                    num_bytes=int(trace.memory.num_bytes[at]),
                    within=around,
                    device=int(trace.memory.device[at]),
                )
            )
            continue
        event = events[place]
        category, name = trace.labels[trace.label[event]]
        node = Node(name, category, start_us, durations_us[place], around)
        if around is not None:
            around.children.append(node)
        nodes.append((node, int(trace.correlation[event]) if category in _LAUNCH_CATEGORIES else NO_CORRELATION))
        around = node
    return nodes


def _charge_kernels(trace: Trace, nodes: Iterable[tuple[Node, int]]) -> bool:
    """Give each kernel's time to the call that launched it; whether there is any kernel."""
    launches = {correlation: node for node, correlation in nodes if correlation != NO_CORRELATION}
    kernels = np.flatnonzero(trace.are(lambda category, _: category in _DEVICE_CATEGORIES))
    for correlation, duration_ns in zip(trace.correlation[kernels].tolist(), trace.duration_ns[kernels], strict=True):
        if correlation in launches:
            launches[correlation].device_us += float(duration_ns) / 1e3
    return bool(len(kernels))


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

    def join(self, addend: "_Sum") -> None:
        self.calls += addend.calls
        self.total_us += addend.total_us
        self.self_us += addend.self_us
        self.device_us += addend.device_us


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
        self, name: str, row_sum: _Sum, spread: tuple[float, float] | None = None, num_collapsed: int = 1
    ) -> TableRow:
        return TableRow(
            name=name,
            calls=row_sum.calls,
            total_us=row_sum.total_us,
            self_us=row_sum.self_us,
            share=row_sum.self_us / self.wall_us,
            num_collapsed=num_collapsed,
            spread=spread,
            device_us=row_sum.device_us if self.has_device else None,
        )

    def rows(self, sums: dict[str, _Sum]) -> list[TableRow]:
        return [self.row(name, row_sum) for name, row_sum in sums.items()]

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
    by_name: dict[str, _Layer] = {}
    for node in nodes:
        if node.name in layer_names or (node.name in names and layer_of(node.name) is None):
            layer = by_name.setdefault(node.name, _Layer(node.name))
            layer.sum.add(node, node.duration)
            layer.operators.update(inner.name for inner in node.walk() if _is_operator(inner, names))
    rows = []
    for _, group in groupby(by_name.values(), key=lambda layer: (layer.name in layer_names, layer.operators)):
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
