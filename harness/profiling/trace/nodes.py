"""The events of a trace that we have just written, as a tree on the thread that ran the engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.base.garbage import collecting_no_garbage
from harness.errors import Code, HarnessError
from harness.profiling.span_names import SPAN, STEP
from harness.profiling.trace.file import NO_CORRELATION, Trace, read_trace

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
    found: list[MemoryEvent] = []
    for thread in np.unique(trace.memory.thread).tolist():
        _tree(trace, np.flatnonzero(is_cpu & (trace.thread == thread)), thread, found)
    return sorted(found, key=lambda event: event.time_us)


def _is_on_cpu(category: str, name: str) -> bool:
    """Whether an event is one of the tree: annotations are if they are spans of ours."""
    return category in _CPU_CATEGORIES or (category == "user_annotation" and bool(SPAN.match(name)))


def _tree(trace: Trace, events: NDArray[np.int64], thread: int, memory: list[MemoryEvent]) -> list[tuple[Node, int]]:
    """Nest the events of one thread by time; return them with what links their kernels to them, -1 for nothing."""
    own = np.flatnonzero(trace.memory.thread == thread)
    starts = np.concatenate([trace.start_ns[events], trace.memory.time_ns[own]])
    durations = np.concatenate([trace.duration_ns[events], np.zeros(len(own), np.int64)])
    nodes: list[tuple[Node, int]] = []
    around: Node | None = None
    starts_us, durations_us = (starts / 1e3).tolist(), (durations / 1e3).tolist()
    for place in np.lexsort((-durations, starts)).tolist():
        start_us = starts_us[place]
        while around is not None and around.start + around.duration <= start_us:
            around = around.parent
        if place >= len(events):
            at = own[place - len(events)]
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
