"""The nesting of a trace's events."""

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.file import Trace

NOT_NESTED = -1


def nest(trace: Trace, events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each event of a trace the innermost of some `events` of its thread that it is nested in, if it is one.

    -1 stands for the outermost of them, and for all that are none. Of two that begin together the longer one is
    outside. What lasts beyond the event that it began in is cut off with it: older traces round to microseconds, and
    the next event may not end up inside of what has ended by then.
    """
    start, duration, thread = trace.start_ns[events], trace.duration_ns[events], trace.thread[events]
    order = np.lexsort((-duration, start, thread))
    parents = []
    open_events, open_ends = list[int](), list[int]()
    last_thread = None
    rows = zip(
        order.tolist(), start[order].tolist(), (start + duration)[order].tolist(), thread[order].tolist(), strict=True
    )
    for place, begin, end, own_thread in rows:
        if own_thread != last_thread:
            open_events, open_ends, last_thread = [], [], own_thread
        while open_ends and open_ends[-1] <= begin:
            open_events.pop()
            open_ends.pop()
        parents.append(open_events[-1] if open_events else NOT_NESTED)
        open_ends.append(min(end, open_ends[-1]) if open_ends else end)
        open_events.append(int(events[place]))
    nested = np.full(len(trace.label), NOT_NESTED)
    nested[events[order]] = parents
    return nested


def innermost(parent: NDArray[np.int64], is_candidate: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each event the innermost candidate that it is nested in, itself left out; -1 for none."""
    found = parent.copy()
    while True:
        passed_over = np.flatnonzero((found != NOT_NESTED) & ~is_candidate[found])
        if not len(passed_over):
            return found
        found[passed_over] = found[found[passed_over]]  # doubles what is passed over
