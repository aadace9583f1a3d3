"""The stacks of a trace, added up: what calls what, and how long."""

from pathlib import Path

import numpy as np

from harness.base.garbage import collecting_no_garbage
from harness.profiling.trace.device import KERNEL_CATEGORIES
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.nesting import NOT_NESTED, nest
from harness.results.trace import FlameFrame

_LEFT_OUT = {*KERNEL_CATEGORIES, "Trace", "gpu_user_annotation"}


def flame(path: Path) -> FlameFrame:
    """Return the events of all CPU threads as one tree: equal names under equal callers are one frame.

    Raises:
        HarnessError: as `read_trace`.
    """
    with collecting_no_garbage():
        trace = read_trace(path)
    is_left_out = trace.are(lambda category, _: category in _LEFT_OUT)
    events = np.flatnonzero(~is_left_out)
    around = nest(trace, events)
    root = FlameFrame(name=path.name)
    frames: dict[int, FlameFrame] = {NOT_NESTED: root}
    order = np.lexsort((-trace.duration_ns[events], trace.start_ns[events], trace.thread[events]))
    for event in events[order].tolist():
        name = trace.name_of(event)
        own = frames[int(around[event])].children.setdefault(name, FlameFrame(name=name))
        own.count += 1
        own.total_us += float(trace.duration_ns[event]) / 1e3
        frames[event] = own
    root.total_us = sum(child.total_us for child in root.children.values())
    return root
