"""A GPU's time in a trace: how long it was busy and why it was not, launches, hidden communication.

Definitions are those of HolisticTraceAnalysis where it has them, so that figures can be compared: idle time is taken by
stream, between one kernel and the next, and launch delay is from the end of the launching call to the kernel.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.columns import NO_CORRELATION, Trace
from harness.results.trace import Communication, DeviceActivity, GraphReplays, IdleTime, Launches

KERNEL_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
"""Older versions of torch use capitals."""


def is_of_device(category: str, _name: str) -> bool:
    """Whether events of this category are work of a device: kernels and copies."""
    return category in KERNEL_CATEGORIES


LAUNCH_CATEGORY = re.compile(r"\w+_(?:runtime|driver)$|Runtime$")
"""Of any kind of device: `cuda_runtime`, `xpu_runtime`, ..."""
GRAPH_LAUNCH = re.compile(r"(?:cu|cuda|hip)GraphLaunch")
"""One call that launches all kernels of a graph; they share its correlation id."""
COMMUNICATION = re.compile(r"nccl|rccl|oneccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)
COPIES = KERNEL_CATEGORIES - {"kernel", "Kernel"}
QUEUED_NS = 30
"""Two kernels with a smaller gap ran back to back."""


def device_activity(trace: Trace) -> tuple[DeviceActivity, ...]:
    """Return what each device of a trace did; empty for a trace without kernels."""
    kernels = np.flatnonzero(trace.are(is_of_device))
    process = trace.processes[trace.thread[kernels]] if len(kernels) else kernels
    return tuple(_activity(trace, int(number), kernels[process == number]) for number in np.unique(process))


def launch_of(trace: Trace, kernels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each kernel the call that launched it, -1 where the trace does not show it."""
    is_launch = trace.are(lambda category, _: LAUNCH_CATEGORY.match(category))
    launches = np.flatnonzero(is_launch & (trace.correlation != NO_CORRELATION))
    launch = np.full(len(kernels), -1)
    if len(launches):
        launches = launches[np.argsort(trace.correlation[launches], kind="stable")]
        at = np.minimum(np.searchsorted(trace.correlation[launches], trace.correlation[kernels]), len(launches) - 1)
        is_found = (trace.correlation[launches[at]] == trace.correlation[kernels]) & (
            trace.correlation[kernels] != NO_CORRELATION
        )
        launch[is_found] = launches[at][is_found]
    return launch


def _activity(trace: Trace, number: int, kernels: NDArray[np.int64]) -> DeviceActivity:
    start, end = trace.start_ns[kernels], trace.end_ns[kernels]
    launch = launch_of(trace, kernels)
    name = trace.process_names[number]
    return DeviceActivity(
        device=number,
        name=f"GPU {name}" if name.isdecimal() else name,
        span_us=float(end.max() - start.min()) / 1e3,
        busy_us=covered(start, end) / 1e3,
        idle=tuple(_idle(trace, kernels, launch)),
        launches=_launches(trace, kernels, launch),
        graphs=tuple(_graphs(trace, kernels, launch)),
        communication=_communication(trace, kernels),
    )


def _idle(trace: Trace, kernels: NDArray[np.int64], launch: NDArray[np.int64]) -> Iterator[IdleTime]:
    """Yield the idle time of each stream by its cause."""
    for stream in np.unique(trace.thread[kernels]):
        in_stream = np.flatnonzero(trace.thread[kernels] == stream)
        in_stream = in_stream[np.argsort(trace.start_ns[kernels[in_stream]], kind="stable")]
        start = trace.start_ns[kernels[in_stream]]
        ends = np.maximum.accumulate(start + trace.duration_ns[kernels[in_stream]])
        gap, before = start[1:] - ends[:-1], ends[:-1]
        caller = launch[in_stream]
        is_gap = gap > 0
        is_in_graph = is_gap & (caller[1:] == caller[:-1]) & (caller[1:] >= 0)
        is_late = is_gap & ~is_in_graph & (caller[1:] >= 0) & (trace.start_ns[caller[1:]] > before)
        is_queue = is_gap & ~is_in_graph & ~is_late & (gap < QUEUED_NS)
        is_other = is_gap & ~is_in_graph & ~is_late & ~is_queue
        late_us, queued_us, in_graph_us, other_us = (
            float(gap[chosen].sum()) / 1e3 for chosen in (is_late, is_queue, is_in_graph, is_other)
        )
        yield IdleTime(
            stream=int(stream), host_late_us=late_us, queued_us=queued_us, in_graph_us=in_graph_us, other_us=other_us
        )


def _launches(trace: Trace, kernels: NDArray[np.int64], launch: NDArray[np.int64]) -> Launches:
    """Count the calls: a graph's launch is one, and its delay ends with its first kernel."""
    known = launch >= 0
    calls, call_of_kernel = np.unique(launch[known], return_inverse=True)
    first = np.full(len(calls), np.iinfo(np.int64).max)
    np.minimum.at(first, call_of_kernel, trace.start_ns[kernels[known]])
    work_ns = np.bincount(call_of_kernel, weights=trace.duration_ns[kernels[known]], minlength=len(calls))
    delay = np.maximum(first - trace.end_ns[calls], 0) / 1e3
    return Launches(
        num_launches=len(calls),
        num_unknown=int((~known).sum()),
        call_us=float(trace.duration_ns[calls].sum()) / 1e3,
        delay_us_median=float(np.median(delay)) if len(delay) else 0.0,
        delay_us_max=float(delay.max(initial=0.0)),
        num_shorter_than_launch=int((work_ns < trace.duration_ns[calls]).sum()),
    )


def _graphs(trace: Trace, kernels: NDArray[np.int64], launch: NDArray[np.int64]) -> Iterator[GraphReplays]:
    """Yield the replays of graphs by their number of nodes: the trace has no other name for a graph."""
    is_graph = trace.are(lambda category, name: LAUNCH_CATEGORY.match(category) and GRAPH_LAUNCH.match(name))
    nodes = np.flatnonzero((launch >= 0) & is_graph[launch])
    calls, replay, num_nodes = np.unique(launch[nodes], return_inverse=True, return_counts=True)
    events = np.split(kernels[nodes[np.argsort(replay, kind="stable")]], np.cumsum(num_nodes)[:-1])
    start = np.array([trace.start_ns[inside].min() for inside in events if len(inside)], np.int64)
    end = np.array([trace.end_ns[inside].max() for inside in events if len(inside)], np.int64)
    busy = np.array([covered(trace.start_ns[inside], trace.end_ns[inside]) for inside in events], np.int64)
    for size in np.unique(num_nodes):
        same = np.flatnonzero(num_nodes == size)
        same = same[np.argsort(start[same])]
        taken = (end - start)[same]
        slowest = int(np.argmax(taken))
        yield GraphReplays(
            num_nodes=int(size),
            count=len(same),
            call_us=float(trace.duration_ns[calls[same]].sum()) / 1e3,
            replay_us_median=float(np.median(taken)) / 1e3,
            replay_us_max=float(taken[slowest]) / 1e3,
            slowest=slowest,
            slowest_at_us=float(start[same[slowest]]) / 1e3,
            inside_idle_us=float(np.maximum(taken - busy[same], 0).sum()) / 1e3,
            between_idle_us=float(np.maximum(start[same][1:] - end[same][:-1], 0).sum()) / 1e3,
        )


def _communication(trace: Trace, kernels: NDArray[np.int64]) -> Communication | None:
    """Return how much of the collectives' time some other kernel computes in; None without collectives."""
    is_collective = trace.are(lambda _, name: COMMUNICATION.search(name))[kernels]
    is_copy = trace.are(lambda category, _: category in COPIES)[kernels]
    if not is_collective.any():
        return None
    start, end = trace.start_ns[kernels], trace.end_ns[kernels]
    computing = ~is_collective & ~is_copy
    total = covered(start[is_collective], end[is_collective])
    compute = covered(start[computing], end[computing])
    both = is_collective | computing
    hidden = total + compute - covered(start[both], end[both])
    durations: dict[str, list[float]] = {}
    for event in kernels[is_collective][np.argsort(start[is_collective], kind="stable")].tolist():
        durations.setdefault(trace.name_of(event), []).append(int(trace.duration_ns[event]) / 1e3)
    return Communication(
        num_kernels=int(is_collective.sum()),
        total_us=total / 1e3,
        hidden_us=hidden / 1e3,
        compute_us=compute / 1e3,
        durations_us={name: tuple(values) for name, values in durations.items()},
    )


def covered(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Return the time that at least one of these intervals covers."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate([[start[0]], end[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())
