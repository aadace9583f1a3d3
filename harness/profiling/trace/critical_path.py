"""The critical path of a trace: the chain of operators, launches and kernels that its duration is made of.

The chain is followed from its end to its beginning. A kernel began when the one before it in its stream ended, or when
the host launched it, or when another stream was done; a call that waits for the GPU ended with the kernel that it
waited for; everything else on the CPU follows from what its thread did before. Each moment is in one link of the chain,
so the links add up to the duration.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.errors import Code, HarnessError
from harness.profiling.trace.columns import Trace
from harness.profiling.trace.device import (
    COMMUNICATION,
    COPIES,
    LAUNCH_CATEGORY,
    QUEUED_NS,
    is_of_device,
    launch_of,
)
from harness.profiling.trace.phases import find_steps
from harness.results.trace import CriticalPath, LinkKind, PathLink

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


_WAITING = re.compile(r"(?:cuda|hip|cu)\w*Synchronize|(?:cuda|hip|cu)Memcpy")
_OTHER_STREAM_NS = 10_000
"""A kernel that begins this soon after a kernel of another stream has waited for it."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One piece of the chain; `event` is what is charged, -1 for nothing that the trace shows."""

    begin_ns: int
    end_ns: int
    kind: LinkKind
    event: int


@dataclass(frozen=True, slots=True)
class _Place:
    """The event at which the chain goes on: the end of a kernel, or a CPU thread."""

    kernel: int | None
    thread: int | None


def critical_path(trace: Trace, path: str, *, within: re.Pattern[str] | None = None, instance: int = 0) -> CriticalPath:
    """Return the chain of a trace, or of one of its steps with the kernels that the step launched.

    The name of the step matches `within`; None: the whole trace. Of the events that match, in order of time, `instance`
    says which.

    Raises:
        HarnessError: BAD_OPTION: no such step.
    """
    walk = _Walk(trace, *_region(trace, within, instance))
    links = list(walk.links())
    return CriticalPath(
        path=path,
        rank=trace.rank,
        total_us=sum(link.end_ns - link.begin_ns for link in links) / 1e3,
        links=tuple(_summed(trace, links)),
    )


def _region(trace: Trace, within: re.Pattern[str] | None, instance: int) -> tuple[int, int]:
    if within is None:
        return trace.extent_ns

    steps = find_steps(trace, within)
    if not -len(steps) <= instance < len(steps):
        raise HarnessError(
            Code.BAD_OPTION,
            f"{len(steps)} events match the step",
            where=f"--within {within.pattern} --instance {instance}",
            expected="a regular expression that the name of a step matches",
            hint="`harness trace summary` names the phases",
        )
    step = steps[instance].event
    begin, end = int(trace.start_ns[step]), int(trace.end_ns[step])
    kernels = np.flatnonzero(trace.are(is_of_device))
    launch = launch_of(trace, kernels)
    launched = np.where(launch >= 0, trace.start_ns[launch], -1)
    return begin, max(end, int(trace.end_ns[kernels[(launched >= begin) & (launched < end)]].max(initial=0)))


class _Walk:
    """The walk from the end of a region to its beginning, link by link."""

    def __init__(self, trace: Trace, begin_ns: int, end_ns: int) -> None:
        self._trace, self._begin, self._end = trace, begin_ns, end_ns
        self._ends = trace.end_ns
        kernels = np.flatnonzero(trace.are(is_of_device))
        self._kernels = kernels[np.argsort(self._ends[kernels], kind="stable")]
        self._kernel_ends = self._ends[self._kernels]
        self._launch = dict(zip(kernels.tolist(), launch_of(trace, kernels).tolist(), strict=True))
        self._before = _previous_of_stream(trace, kernels)
        self._timelines = cpu_timelines(trace)
        self._is_waiting = trace.are(lambda _, name: _WAITING.match(name))

    def links(self) -> Iterator[_Link]:
        """Yield the links, the last one first; each begins where the next one ends."""
        now, kernel, thread = self._end, self._last_kernel(self._begin, self._end), self._last_thread(self._end)
        if thread is not None and (kernel is None or self._timelines[thread].last_end(now) > self._ends[kernel]):
            kernel = None
        if kernel is not None and self._ends[kernel] < now:  # an annotation, or Python, went on after all work
            yield _Link(int(self._ends[kernel]), now, LinkKind.HOST, NO_EVENT)
            now = int(self._ends[kernel])
        while now > self._begin:
            if kernel is not None:
                pieces, place = self._from_kernel(kernel, now, thread)
                kernel, thread = place.kernel, place.thread
                yield from (piece for piece in pieces if piece.end_ns > piece.begin_ns)
                now = pieces[-1].begin_ns
            elif thread is not None:
                piece, kernel = self._from_thread(thread, now)
                if piece.begin_ns == now:
                    thread = self._last_thread(now, apart_from=thread)
                    continue
                yield piece
                now = piece.begin_ns
            else:
                yield _Link(self._begin, now, LinkKind.UNKNOWN, NO_EVENT)
                return

    def _from_kernel(self, kernel: int, now: int, thread: int | None) -> tuple[list[_Link], _Place]:
        """Return the kernel and what lies before its begin, and where the chain goes on: a kernel, or a thread."""
        start = int(self._trace.start_ns[kernel])
        links = [_Link(max(start, self._begin), now, self._kind(kernel), kernel)]
        if start <= self._begin:
            return links, _Place(None, thread)
        launch, before = self._launch[kernel], self._before.get(kernel)
        launched = int(self._trace.start_ns[launch]) if launch >= 0 else -1
        previous_end = int(self._ends[before]) if before is not None else -1
        ready = max(launched, previous_end)
        rival = self._last_kernel(max(ready, start - _OTHER_STREAM_NS), start)
        # Of two that take no time, neither has waited for the other: the chain would lead to and fro.
        is_earlier = rival is not None and rival != before and self._trace.start_ns[rival] < start
        if rival is not None and is_earlier and start - ready > QUEUED_NS:
            cause, kind, goes_on = int(self._ends[rival]), LinkKind.OTHER_STREAM, _Place(rival, thread)
        elif before is not None and previous_end > launched:
            cause, kind, goes_on = previous_end, LinkKind.QUEUE, _Place(before, thread)
        elif launch >= 0:
            cause, kind, goes_on = launched, LinkKind.LAUNCH, _Place(None, int(self._trace.thread[launch]))
        else:
            cause, kind, goes_on = start, LinkKind.LAUNCH, _Place(None, self._last_thread(start))
        links.append(_Link(max(self._begin, min(cause, start)), start, kind, kernel))
        return links, goes_on

    def _from_thread(self, thread: int, now: int) -> tuple[_Link, int | None]:
        """Return what the thread did last, and the kernel that it waited for, if any."""
        begin, event = self._timelines[thread].before(now)
        begin = max(begin, self._begin)
        if event == NO_EVENT:
            return _Link(begin, now, LinkKind.HOST, NO_EVENT), None
        kind = LinkKind.RUNTIME if self._timelines[thread].is_call[event] else LinkKind.OPERATOR
        if self._is_waiting[event]:
            waited = self._waited_for(event, now)
            if waited is not None:
                return _Link(int(self._ends[waited]), now, kind, event), waited
        return _Link(begin, now, kind, event), None

    def _waited_for(self, call: int, now: int) -> int | None:
        """Return the kernel that a waiting call ended with; of a copy it is the copy itself."""
        start = max(int(self._trace.start_ns[call]), self._begin)
        if "Memcpy" not in self._trace.name_of(call):
            return self._last_kernel(start, now - 1)
        launched = [kernel for kernel, launch in self._launch.items() if launch == call] if self._launch else []
        return next((kernel for kernel in launched if start < self._ends[kernel] < now), None)

    def _last_kernel(self, after: int, until: int) -> int | None:
        """Return the kernel that ended last in this time."""
        at = int(np.searchsorted(self._kernel_ends, until, side="right")) - 1
        return int(self._kernels[at]) if at >= 0 and self._kernel_ends[at] > after else None

    def _last_thread(self, until: int, apart_from: int | None = None) -> int | None:
        """Return the thread of the CPU that did something last."""
        ends = {
            number: line.last_end(until)
            for number, line in self._timelines.items()
            if number != apart_from and line.first_begin < until
        }
        return max(ends, key=lambda number: ends[number], default=None)

    def _kind(self, kernel: int) -> LinkKind:
        category, name = self._trace.labels[self._trace.label[kernel]]
        if category in COPIES:
            return LinkKind.COPY
        return LinkKind.COMMUNICATION if COMMUNICATION.search(name) else LinkKind.KERNEL


def _previous_of_stream(trace: Trace, kernels: NDArray[np.int64]) -> dict[int, int]:
    """Return for each kernel the one before it in its stream."""
    order = kernels[np.lexsort((trace.start_ns[kernels], trace.thread[kernels]))]
    is_same = trace.thread[order[1:]] == trace.thread[order[:-1]]
    return dict(zip(order[1:][is_same].tolist(), order[:-1][is_same].tolist(), strict=True))


def _summed(trace: Trace, links: list[_Link]) -> list[PathLink]:
    """Return one sum for each kind and name, the longest first."""
    sums: dict[tuple[LinkKind, str], list[int]] = {}
    for link in links:
        name = trace.name_of(link.event) if link.event != NO_EVENT else ""
        sum_of_name = sums.setdefault((link.kind, name), [0, 0])
        sum_of_name[0] += 1
        sum_of_name[1] += link.end_ns - link.begin_ns
    path_links = [
        PathLink(kind=kind, name=name, count=count, total_us=total / 1e3)
        for (kind, name), (count, total) in sums.items()
    ]
    return sorted(path_links, key=lambda link: link.total_us, reverse=True)
