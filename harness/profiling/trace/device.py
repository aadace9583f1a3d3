"""A GPU's time in a trace: how long it was busy and why it was not, launches, hidden communication.

Definitions are those of HolisticTraceAnalysis where it has them, so that figures can be compared: idle time is taken by
stream, between one kernel and the next, and launch delay is from the end of the launching call to the kernel.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.file import NO_CORRELATION, Trace
from harness.results.trace import Communication, DeviceActivity, IdleTime, Launches

KERNEL_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
"""Older versions of torch use capitals."""


def is_of_device(category: str, _name: str) -> bool:
    """Whether events of this category are work of a device: kernels and copies."""
    return category in KERNEL_CATEGORIES


LAUNCH_CATEGORY = re.compile(r"\w+_(?:runtime|driver)$|Runtime$")
"""Of any kind of device: `cuda_runtime`, `xpu_runtime`, ..."""
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
    return DeviceActivity(
        device=number,
        span_us=float(end.max() - start.min()) / 1e3,
        busy_us=_covered(start, end) / 1e3,
        idle=tuple(_idle(trace, kernels, launch)),
        launches=_launches(trace, kernels, launch),
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
        caller = launch[in_stream][1:]
        is_gap = gap > 0
        is_late = is_gap & (caller >= 0) & (trace.start_ns[caller] > before)
        is_queue = is_gap & ~is_late & (gap < QUEUED_NS)
        sums = [float(gap[chosen].sum()) / 1e3 for chosen in (is_late, is_queue, is_gap & ~is_late & ~is_queue)]
        yield IdleTime(stream=int(stream), host_late_us=sums[0], queued_us=sums[1], other_us=sums[2])


def _launches(trace: Trace, kernels: NDArray[np.int64], launch: NDArray[np.int64]) -> Launches:
    known = launch >= 0
    calls, launched = launch[known], kernels[known]
    delay = np.maximum(trace.start_ns[launched] - trace.start_ns[calls] - trace.duration_ns[calls], 0) / 1e3
    in_call = trace.duration_ns[calls] / 1e3
    is_short = trace.duration_ns[launched] < trace.duration_ns[calls]
    return Launches(
        num_launches=int(known.sum()),
        num_unknown=int((~known).sum()),
        call_us=float(in_call.sum()),
        delay_us_median=float(np.median(delay)) if len(delay) else 0.0,
        delay_us_max=float(delay.max(initial=0.0)),
        num_shorter_than_launch=int(is_short.sum()),
    )


def _communication(trace: Trace, kernels: NDArray[np.int64]) -> Communication | None:
    """Return how much of the collectives' time some other kernel computes in; None without collectives."""
    is_collective = trace.are(lambda _, name: COMMUNICATION.search(name))[kernels]
    is_copy = trace.are(lambda category, _: category in COPIES)[kernels]
    if not is_collective.any():
        return None
    start, end = trace.start_ns[kernels], trace.end_ns[kernels]
    computing = ~is_collective & ~is_copy
    total = _covered(start[is_collective], end[is_collective])
    compute = _covered(start[computing], end[computing])
    both = is_collective | computing
    hidden = total + compute - _covered(start[both], end[both])
    return Communication(
        num_kernels=int(is_collective.sum()), total_us=total / 1e3, hidden_us=hidden / 1e3, compute_us=compute / 1e3
    )


def _covered(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """Return the time that at least one of these intervals covers."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate([[start[0]], end[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())
