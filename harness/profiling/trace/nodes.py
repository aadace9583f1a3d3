"""The events of a trace that we have just written, as a tree on the thread that ran the engine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.profiling.passes.spans import STEP

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
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    device_us: float = 0.0
    """Of the kernels launched by this very event."""

    def walk(self) -> Iterator[Node]:
        """Yield the event and everything in it, in order of time."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))

    def around(self, time_us: float) -> Iterator[Node]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvents:
    """What a trace holds of the engine's own thread."""

    steps: tuple[Node, ...]
    """The spans of whole steps."""
    memory: tuple[MemoryEvent, ...]
    has_device: bool
    """Whether there are GPU kernels."""


def read_events(path: Path) -> TraceEvents:
    """Read a trace.

    Raises:
        HarnessError: PROFILER_FAILED: it cannot be read, or holds no step.
    """
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise HarnessError(Code.PROFILER_FAILED, f"the trace cannot be read: {error}", where=path) from error
    # A GPU's stream may show the span again, in a category of its own.
    thread = next((own["tid"] for own in events if own["name"] == STEP and own.get("cat") in _CPU_CATEGORIES), None)
    if thread is None:
        raise HarnessError(Code.PROFILER_FAILED, "the trace holds no step", where=path)
    own = [event for event in events if event.get("tid") == thread]
    memory: list[MemoryEvent] = []
    nodes = _tree(own, memory)
    has_device = _charge_kernels(events, nodes)
    return TraceEvents(
        steps=tuple(node for node, _ in nodes if node.name == STEP), memory=tuple(memory), has_device=has_device
    )


def _tree(events: Iterable[dict[str, Any]], memory: list[MemoryEvent]) -> list[tuple[Node, int | None]]:
    """Nest the events of one thread by time; return them with what links their kernels to them."""
    timed = [event for event in events if event.get("cat") in _CPU_CATEGORIES or event["name"] == "[memory]"]
    nodes: list[tuple[Node, int | None]] = []
    around: Node | None = None
    for event in sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        while around is not None and around.start + around.duration <= event["ts"]:
            around = around.parent
        args = event.get("args", {})
        if event["name"] == "[memory]":
            memory.append(
                MemoryEvent(time_us=event["ts"], address=args["Addr"], num_bytes=args["Bytes"], within=around)
            )
            continue
        node = Node(event["name"], event["cat"], event["ts"], event["dur"], around)
        if around is not None:
            around.children.append(node)
        nodes.append((node, args.get("correlation") if event["cat"] in _LAUNCH_CATEGORIES else None))
        around = node
    return nodes


def _charge_kernels(events: Iterable[dict[str, Any]], nodes: Iterable[tuple[Node, int | None]]) -> bool:
    """Give each kernel's time to the call that launched it; whether there is any kernel."""
    launches = {correlation: node for node, correlation in nodes if correlation is not None}
    has_device = False
    for event in events:
        if event.get("cat") in _DEVICE_CATEGORIES:
            has_device = True
            launch = launches.get(event.get("args", {}).get("correlation"))
            if launch is not None:
                launch.device_us += event["dur"]
    return has_device
