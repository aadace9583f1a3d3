"""The stacks of a trace, added up: what calls what, and how long."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.base.garbage import collecting_no_garbage
from harness.profiling.trace.device import KERNEL_CATEGORIES
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.nesting import NOT_NESTED, nest
from harness.results.trace import FlameFrame


def flame(path: Path) -> FlameFrame:
    """Return the events of all CPU threads as one tree: equal names under equal callers are one frame.

    Raises:
        HarnessError: as `read_trace`.
    """
    with collecting_no_garbage():
        trace = read_trace(path)
    is_left_out = np.array(
        [category in KERNEL_CATEGORIES or category in ("Trace", "gpu_user_annotation") for category, _ in trace.labels],
        bool,
    )[trace.label]
    events = np.flatnonzero(~is_left_out)
    parent = nest(trace.start_ns[events], trace.duration_ns[events], trace.thread[events])
    root = FlameFrame(name=path.name)
    frames: dict[int, FlameFrame] = {NOT_NESTED: root}
    order = np.lexsort((-trace.duration_ns[events], trace.start_ns[events], trace.thread[events]))
    for place in order.tolist():
        event, outer = events[place], frames[int(parent[place])]
        name = trace.labels[trace.label[event]][1]
        own = outer.children.setdefault(name, FlameFrame(name=name))
        own.count += 1
        own.total_us += float(trace.duration_ns[event]) / 1e3
        frames[place] = own
    root.total_us = sum(child.total_us for child in root.children.values())
    return root
