"""The activity of each CPU thread at every moment: its innermost operator, or call of the device's runtime."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.device import LAUNCH_CATEGORY
from harness.profiling.trace.file import Trace

NO_EVENT = -1
_OPERATORS = {"cpu_op", "Operator", ""}


@dataclass(frozen=True, slots=True)
class ThreadTimeline:
    """One thread, cut into pieces in each of which one event is the innermost."""

    begin_ns: NDArray[np.int64]
    """Of each piece; it ends where the next one begins."""
    event: NDArray[np.int64]
    """Of each piece; -1 where the thread is in no operator and no call."""
    is_call: NDArray[np.bool_]
    """Of each event of the trace: whether it is a call of the device's runtime."""

    @property
    def first_begin(self) -> int:
        """Of the first event."""
        return int(self.begin_ns[0])

    def before(self, now: int) -> tuple[int, int]:
        """Return the begin of the piece that lasts until `now`, and its event; ahead of the first one `now` itself."""
        at = int(np.searchsorted(self.begin_ns, now, side="left")) - 1
        return (int(self.begin_ns[at]), int(self.event[at])) if at >= 0 else (now, NO_EVENT)

    def last_end(self, until: int) -> int:
        """Return when the thread's last event until then ended."""
        at = int(np.searchsorted(self.begin_ns, until, side="left")) - 1
        if at < 0:
            return -1
        return until if self.event[at] != NO_EVENT else int(self.begin_ns[at])


def cpu_timelines(trace: Trace) -> dict[int, ThreadTimeline]:
    """Return the threads that ran operators or calls, by number."""
    is_operator = trace.are(lambda category, _: category in _OPERATORS)
    is_call = trace.are(lambda category, _: LAUNCH_CATEGORY.match(category))
    events = np.flatnonzero(is_operator | is_call)
    return {
        int(thread): ThreadTimeline(*_pieces(trace, events[trace.thread[events] == thread]), is_call)
        for thread in np.unique(trace.thread[events])
    }


def _pieces(trace: Trace, events: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each piece begins and which event is the innermost there: of two that begin together the shorter."""
    start, end = trace.start_ns[events], trace.end_ns[events]
    order = np.lexsort((-end, start))
    begins, owners = list[int](), list[int]()
    open_events, open_ends = list[int](), list[int]()

    def close_until(now: float) -> None:
        while open_ends and open_ends[-1] <= now:
            begins.append(open_ends.pop())
            open_events.pop()
            owners.append(open_events[-1] if open_events else NO_EVENT)

    for event, begin, until in zip(events[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True):
        close_until(begin)
        begins.append(begin)
        owners.append(event)
        open_events.append(event)
        open_ends.append(min(until, open_ends[-1]) if open_ends else until)
    close_until(np.inf)
    return np.array(begins, np.int64), np.array(owners, np.int64)
