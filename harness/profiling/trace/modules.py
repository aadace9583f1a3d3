"""The time of `nn.Module`s, rolled up from the events that `with_stack=True` or `with_modules=True` leave in a trace.

Modules are named by their classes and a number (`nn.Module: Linear_7`). Rolled up, all `Linear`s in a `Qwen3Attention`
are one row.
"""

import re

import numpy as np
from numpy.typing import NDArray

from harness.profiling.trace.device import is_of_device, launch_of
from harness.profiling.trace.file import Trace
from harness.profiling.trace.nesting import NOT_NESTED, innermost, nest
from harness.results.trace import ModuleKernel, TraceModule

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
    found = innermost(nest(trace, np.flatnonzero(~is_kernel)), is_module)
    kernels = np.flatnonzero(is_kernel)
    launch = launch_of(trace, kernels)
    found[kernels] = np.where(launch >= 0, found[launch], NOT_NESTED)
    return found


def _summed(
    trace: Trace, paths: dict[int, str], around: NDArray[np.int64], is_operator: NDArray[np.bool_]
) -> tuple[TraceModule, ...]:
    number = {path: index for index, path in enumerate(dict.fromkeys(paths.values()))}
    events = np.fromiter(paths, np.int64, len(paths))
    own = np.array([number[path] for path in paths.values()], np.int64)
    row_of = np.full(len(around), -1)
    row_of[events] = own
    inner = events[around[events] != NOT_NESTED]
    inside = np.bincount(row_of[around[inner]], weights=trace.duration_ns[inner], minlength=len(number))
    is_kernel = trace.are(is_of_device)
    charged = np.where(around != NOT_NESTED, row_of[around], -1)
    calls, total = np.bincount(own), np.bincount(own, weights=trace.duration_ns[events])
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
        own = sums.setdefault((paths[int(around[event])], trace.name_of(event)), [0, 0])
        own[0] += 1
        own[1] += int(trace.duration_ns[event])
    found = [
        ModuleKernel(path=path, name=name, count=count, total_us=total / 1e3)
        for (path, name), (count, total) in sums.items()
    ]
    return tuple(sorted(found, key=lambda kernel: kernel.total_us, reverse=True))
