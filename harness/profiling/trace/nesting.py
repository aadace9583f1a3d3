"""What calls what in a trace: the nesting of its events, the time of modules, and stacks added up.

Modules are named by their classes and a number (`nn.Module: Linear_7`). Rolled up, all `Linear`s in a `Qwen3Attention`
are one row. `with_stack=True` or `with_modules=True` leaves these events in a trace.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.base.memory import collecting_no_garbage
from harness.profiling.trace.columns import Trace
from harness.profiling.trace.device import KERNEL_CATEGORIES, is_of_device, launch_of
from harness.profiling.trace.file import read_trace
from harness.results.trace import FlameFrame, ModuleKernel, TraceModule

NOT_NESTED = -1


def nest(trace: Trace, events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each event of a trace the innermost of some `events` of its thread that it is nested in, if it is one.

    -1 stands for the outermost of them, and for all that are none. Of two that begin together the longer one is
    outside. What lasts beyond the event that it began in is cut off with it: older traces round to microseconds, and
    the next event may not end up inside of what has ended by then.
    """
    ordered = events[np.lexsort((-trace.duration_ns[events], trace.start_ns[events], trace.thread[events]))]
    nested = np.full(len(trace.label), NOT_NESTED)
    nested[ordered] = np.fromiter(_parents(trace, ordered), np.int64, len(ordered))
    return nested


_ROWS = 1 << 14
"""Events that are numbers of Python at once, which take ten times the memory of a column's."""


def _parents(trace: Trace, ordered: NDArray[np.int64]) -> Iterator[int]:
    """Yield for each event, in order of thread and time, the innermost one that it is nested in."""
    open_events, open_ends = list[int](), list[int]()
    last_thread = None
    for at in range(0, len(ordered), _ROWS):
        rows = ordered[at : at + _ROWS]
        columns = (column[rows].tolist() for column in (trace.start_ns, trace.duration_ns, trace.thread))
        for event, begin, duration, own_thread in zip(rows.tolist(), *columns, strict=True):
            if own_thread != last_thread:
                open_events, open_ends, last_thread = [], [], own_thread
            while open_ends and open_ends[-1] <= begin:
                open_events.pop()
                open_ends.pop()
            yield open_events[-1] if open_events else NOT_NESTED
            end = begin + duration
            open_ends.append(min(end, open_ends[-1]) if open_ends else end)
            open_events.append(event)


def innermost(parent: NDArray[np.int64], is_candidate: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each event the innermost candidate that it is nested in, itself left out; -1 for none."""
    enclosing = parent.copy()
    while True:
        passed_over = np.flatnonzero((enclosing != NOT_NESTED) & ~is_candidate[enclosing])
        if not len(passed_over):
            return enclosing
        enclosing[passed_over] = enclosing[enclosing[passed_over]]  # doubles what is passed over


_MODULE = re.compile(r"nn\.Module: (.+?)(?:_\d+)?$")
_OPERATORS = {"cpu_op", "Operator"}


def module_times(trace: Trace) -> tuple[tuple[TraceModule, ...], tuple[ModuleKernel, ...]]:
    """Return the modules by their path of classes, in order of their first call, and the kernels of each.

    Both are empty if the trace has no modules.
    """
    names = [_MODULE.match(name) for _, name in trace.labels]
    is_module = np.array([match is not None for match in names], bool)[trace.label]
    if not is_module.any():
        return (), ()
    is_operator = trace.are(lambda category, _: category in _OPERATORS)
    around = _enclosing(trace, is_module)
    paths: dict[int, str] = {}
    modules = np.flatnonzero(is_module)
    for event in modules[np.argsort(trace.start_ns[modules], kind="stable")].tolist():
        match = names[trace.label[event]]
        assert match is not None
        outer = int(around[event])
        paths[event] = f"{paths[outer]}/{match[1]}" if outer in paths else match[1]
    return _summed(trace, paths, around, is_operator), _kernels(trace, paths, around)


def _enclosing(trace: Trace, is_module: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each event of a CPU thread the innermost module that it is in."""
    is_kernel = trace.are(is_of_device)
    module = innermost(nest(trace, np.flatnonzero(~is_kernel)), is_module)
    kernels = np.flatnonzero(is_kernel)
    launch = launch_of(trace, kernels)
    module[kernels] = np.where(launch >= 0, module[launch], NOT_NESTED)
    return module


def _summed(
    trace: Trace, paths: dict[int, str], around: NDArray[np.int64], is_operator: NDArray[np.bool_]
) -> tuple[TraceModule, ...]:
    number = {path: index for index, path in enumerate(dict.fromkeys(paths.values()))}
    events = np.fromiter(paths, np.int64, len(paths))
    rows = np.array([number[path] for path in paths.values()], np.int64)
    row_of = np.full(len(around), -1)
    row_of[events] = rows
    inner = events[around[events] != NOT_NESTED]
    inside = np.bincount(row_of[around[inner]], weights=trace.duration_ns[inner], minlength=len(number))
    is_kernel = trace.are(is_of_device)
    charged = np.where(around != NOT_NESTED, row_of[around], -1)
    calls, total = np.bincount(rows), np.bincount(rows, weights=trace.duration_ns[events])
    operators = np.bincount(charged[is_operator & (charged >= 0)], minlength=len(number))
    kernels = is_kernel & (charged >= 0)
    device = np.bincount(charged[kernels], weights=trace.duration_ns[kernels], minlength=len(number))
    return tuple(
        TraceModule(
            path=path,
            count=int(calls[row]),
            total_us=float(total[row]) / 1e3,
            self_us=float(total[row] - inside[row]) / 1e3,
            num_operators=int(operators[row]),
            device_us=float(device[row]) / 1e3,
        )
        for path, row in number.items()
    )


def _kernels(trace: Trace, paths: dict[int, str], around: NDArray[np.int64]) -> tuple[ModuleKernel, ...]:
    """Return the kernels by the innermost module that launched them, those that take longest first."""
    is_kernel = trace.are(is_of_device)
    sums: dict[tuple[str, str], list[int]] = {}
    for event in np.flatnonzero(is_kernel & (around != NOT_NESTED)).tolist():
        sum_of_name = sums.setdefault((paths[int(around[event])], trace.name_of(event)), [0, 0])
        sum_of_name[0] += 1
        sum_of_name[1] += int(trace.duration_ns[event])
    kernels = [
        ModuleKernel(path=path, name=name, count=count, total_us=total / 1e3)
        for (path, name), (count, total) in sums.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: kernel.total_us, reverse=True))


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
        frame = frames[int(around[event])].children.setdefault(name, FlameFrame(name=name))
        frame.count += 1
        frame.total_us += float(trace.duration_ns[event]) / 1e3
        frames[event] = frame
    root.total_us = sum(child.total_us for child in root.children.values())
    return root
