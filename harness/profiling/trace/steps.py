"""What each step of a trace cost: its time, the device's work in it by category, launches, and waits of the host.

Steps are repeats of each other: their spread is the noise of a comparison.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.columns import Trace
from harness.profiling.trace.device import GRAPH_LAUNCH, LAUNCH_CATEGORY, covered, is_of_device, launch_of
from harness.profiling.trace.kernels import category_of
from harness.profiling.trace.phases import TraceRange, outermost
from harness.results.trace import TraceStep

WAITING = re.compile(r"(?:cuda|hip|cu|aclrt)\w*Synchronize|(?:cuda|hip)Memcpy$|hipMemcpyWithStream")
"""Calls in which the host waits for the device."""
NO_STEP = -1
WHOLE = "the trace"
"""The phase of a trace in which nothing is annotated."""
_OPERATORS = {"cpu_op", "Operator", ""}


def step_of_events(trace: Trace, steps: Sequence[TraceRange]) -> NDArray[np.int64]:
    """Return for each event the index of its step, the innermost one, -1 outside.

    On the CPU by time, in the threads of the step's process; on the GPU by the call that launched it.
    """
    number = np.full(len(trace.label), NO_STEP)
    if len(steps) == 1 and steps[0].event < 0:
        return np.zeros(len(trace.label), np.int64)
    process = trace.processes[trace.thread] if len(trace.processes) else np.zeros(0, np.int32)
    is_kernel = trace.are(is_of_device)
    on_cpu = np.flatnonzero(~is_kernel)
    on_cpu = on_cpu[np.argsort(trace.start_ns[on_cpu], kind="stable")]
    starts = trace.start_ns[on_cpu]
    for index, step in enumerate(steps):  # those further inside come later, and win
        begin = trace.start_ns[step.event]
        low, high = np.searchsorted(starts, (begin, begin + trace.duration_ns[step.event]))
        inside = on_cpu[low:high]
        number[inside[process[inside] == process[step.event]]] = index
    kernels = np.flatnonzero(is_kernel)
    launch = launch_of(trace, kernels)
    number[kernels[launch >= 0]] = number[launch[launch >= 0]]
    return number


def measure_steps(trace: Trace, steps: Sequence[TraceRange]) -> tuple[TraceStep, ...]:
    """Return what each of the steps cost that are in no other one; without any, the whole trace is a step.

    A step lasts until its last kernel ends. The time in which the step before it of its process was still running is
    not part of it: an engine prepares a step while the device is busy with another.
    """
    steps = list(outermost(trace, steps)) or [TraceRange(NO_STEP, WHOLE)]
    columns = _Columns(trace, steps)
    last_ends: dict[str, int] = {}
    measured = []
    for index, step in enumerate(steps):
        begin, end = columns.extent(index)
        process = trace.process_name_of(step.event) if step.event >= 0 else ""
        last_end = last_ends.get(process, begin)
        begin_alone, gap = min(max(begin, last_end), end), max(begin - last_end, 0)
        measured.append(columns.measured(index, step, process, begin_alone, end, gap))
        last_ends[process] = max(end, last_end)
    return tuple(measured)


class _Columns:
    """Events by step."""

    def __init__(self, trace: Trace, steps: Sequence[TraceRange]) -> None:
        self._trace, self._steps = trace, steps
        number = step_of_events(trace, steps)
        is_kernel = trace.are(is_of_device)
        is_call = trace.are(lambda category, _: LAUNCH_CATEGORY.match(category))
        self._kernels = _by_step(np.flatnonzero(is_kernel), number, len(steps))
        launch = np.full(len(trace.label), NO_STEP)
        launch[is_kernel] = launch_of(trace, np.flatnonzero(is_kernel))
        self._launch = launch
        self._has_device = bool(is_kernel.any())
        self._is_graph = trace.are(lambda _, name: GRAPH_LAUNCH.match(name))
        self._waits = _by_step(
            np.flatnonzero(is_call & trace.are(lambda _, name: WAITING.match(name))), number, len(steps)
        )
        self._num_operators = np.bincount(
            number[(number >= 0) & trace.are(lambda category, _: category in _OPERATORS)], minlength=len(steps)
        )
        self._category = [category_of(name) for _, name in trace.labels]

    def extent(self, index: int) -> tuple[int, int]:
        """Return when a step begins, and when it and its last kernel have ended."""
        trace, event = self._trace, self._steps[index].event
        if event < 0:
            return trace.extent_ns
        ends = trace.end_ns[self._kernels[index]]
        return int(trace.start_ns[event]), int(max(trace.end_ns[event], ends.max(initial=0)))

    def measured(self, index: int, step: TraceRange, process: str, begin: int, end: int, gap: int) -> TraceStep:
        """Return what a step cost that ran from `begin` to `end`, `gap` after the one before it."""
        trace, kernels, waits = self._trace, self._kernels[index], self._waits[index]
        calls = np.unique(self._launch[kernels])
        calls = calls[calls >= 0]
        starts = np.maximum(trace.start_ns[kernels], begin)
        busy = covered(starts, np.maximum(trace.end_ns[kernels], starts))
        figures = {"step us": (end - begin) / 1e3, "between steps us": gap / 1e3}
        if self._has_device:
            figures |= {"device busy us": busy / 1e3, "device idle us": (end - begin - busy) / 1e3}
            figures |= {"waits of the host us": float(trace.duration_ns[waits].sum()) / 1e3}
            figures |= {"launches": len(calls), "graph launches": int(self._is_graph[calls].sum())}
            figures |= {"kernels": len(kernels), "waiting calls": len(waits)}
        figures["operators"] = int(self._num_operators[index])
        for label, duration in zip(trace.label[kernels].tolist(), trace.duration_ns[kernels].tolist(), strict=True):
            name = f"{self._category[label]} us"
            figures[name] = figures.get(name, 0.0) + duration / 1e3
        return TraceStep(phase=step.phase, size=step.size, process=process, begin_us=begin / 1e3, figures=figures)


def _by_step(events: NDArray[np.int64], number: NDArray[np.int64], num_steps: int) -> list[NDArray[np.int64]]:
    """Return the events of each step."""
    events = events[number[events] >= 0]
    events = events[np.argsort(number[events], kind="stable")]
    return np.split(events, np.searchsorted(number[events], np.arange(1, num_steps)))
