"""A Chrome trace of torch, summed up by phase, operation, operator and rate."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from harness.base.memory import collecting_no_garbage
from harness.profiling.trace.columns import Trace
from harness.profiling.trace.device import LAUNCH_CATEGORY, device_activity, is_of_device
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.kernels import category_of, readable
from harness.profiling.trace.nesting import NOT_NESTED, innermost, module_times, nest
from harness.profiling.trace.phases import TraceRange, find_steps
from harness.profiling.trace.rates import measured_rates
from harness.profiling.trace.steps import measure_steps, step_of_events
from harness.profiling.trace.tables import SPAN, STEP
from harness.results.trace import (
    PhaseSize,
    TraceOperation,
    TraceOperator,
    TracePhase,
    TraceSummary,
)

# Capitals are of older versions of torch; lists of events that are not the profiler's own have no category.
_OPERATOR_CATEGORIES = {"cpu_op", "Operator", ""}
_LAYER_PREFIX = re.compile(r"^model\.layers\.\d+\.")
_LAYER = re.compile(r"^model\.layers\.\d+$")
_ADDRESS = re.compile(r" object at 0x[0-9a-f]+")
"""In the names of Python's built-in methods: another one in each process."""


def summarize(path: Path, phase_pattern: re.Pattern[str] | None = None) -> TraceSummary:
    """Read a trace and sum it up.

    Events whose names match `phase_pattern` are steps; its first group is the phase, or the whole match. None: what the
    annotations say.

    Raises:
        HarnessError: as `read_trace`.
    """
    with collecting_no_garbage():
        return summarize_trace(read_trace(path), str(path), phase_pattern)


def summarize_trace(
    trace: Trace,
    path: str,
    phase_pattern: re.Pattern[str] | None = None,
    *,
    steps: Sequence[TraceRange] | None = None,
    with_host: bool = False,
) -> TraceSummary:
    """Sum up a trace that has been read.

    Of the annotated steps only `steps`, where these are passed; `with_host` adds calls of the runtime and Python.
    """
    if steps is None:
        steps = find_steps(trace, phase_pattern)
    columns = _Columns(trace, steps)
    begin, end = trace.extent_ns
    modules, module_kernels = module_times(trace)
    return TraceSummary(
        path=path,
        num_events=trace.num_events,
        left_out=trace.left_out,
        duration_us=(end - begin) / 1e3,
        phases=tuple(columns.phases()),
        steps=measure_steps(trace, steps),
        operators=tuple(sorted(columns.operators(), key=lambda operator: operator.self_us, reverse=True)),
        host=tuple(columns.host()) if with_host else (),
        operations=tuple(columns.operations()),
        modules=modules,
        module_kernels=module_kernels,
        rates=measured_rates(trace),
        devices=device_activity(trace),
        rank=trace.rank,
    )


class _Columns:
    """A trace's columns, and those that follow from them."""

    def __init__(self, trace: Trace, steps: Sequence[TraceRange]) -> None:
        self._trace = trace
        self._is_span = trace.are(_is_span)
        self._is_operator = trace.are(lambda category, _: category in _OPERATOR_CATEGORIES) & ~self._is_span
        self._is_kernel = trace.are(is_of_device)
        self._steps = steps
        self._phase_names = tuple(dict.fromkeys(step.phase for step in steps))
        numbers = np.array([self._phase_names.index(step.phase) for step in steps] + [NOT_NESTED], np.int64)
        self._phase = numbers[step_of_events(trace, steps)]
        self._parent = nest(trace, np.flatnonzero(self._is_operator | self._is_span))

    def phases(self) -> Iterator[TracePhase]:
        times: dict[str, dict[str, list[float]]] = {name: {} for name in self._phase_names}
        for step in self._steps:
            times[step.phase].setdefault(step.size, []).append(float(self._trace.duration_ns[step.event]) / 1e3)
        for name, by_size in times.items():
            sizes = [PhaseSize(size=size, count=len(us), median_us=median(us)) for size, us in by_size.items()]
            yield TracePhase(
                name=name,
                count=sum(size.count for size in sizes),
                total_us=sum(map(sum, by_size.values())),
                sizes=tuple(sorted(sizes, key=lambda size: -size.count)),
            )

    def operators(self) -> Iterator[TraceOperator]:
        self_ns = self._self_ns(innermost(self._parent, self._is_operator), self._is_operator)
        yield from self._grouped(np.flatnonzero(self._is_operator), self_ns, "cpu")
        yield from self._grouped(np.flatnonzero(self._is_kernel), self_ns, "gpu")

    def host(self) -> Iterator[TraceOperator]:
        """Sum up the calls of the device's runtime, and the Python functions without what they call."""
        is_call = self._trace.are(lambda category, _: LAUNCH_CATEGORY.match(category))
        is_python = self._trace.are(lambda category, _: category == "python_function")
        chosen = is_call | is_python | self._is_operator
        self_ns = self._self_ns(nest(self._trace, np.flatnonzero(chosen)), chosen)
        yield from self._grouped(np.flatnonzero(is_call), self_ns, "call")
        is_line = is_python & self._trace.are(lambda _, name: not name.startswith("nn.Module"))
        yield from self._grouped(np.flatnonzero(is_line), self_ns, "python")

    def _self_ns(self, calling: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the time of each event without that of the chosen ones that it calls."""
        starts, durations, ends = self._trace.start_ns, self._trace.duration_ns, self._trace.end_ns
        called = np.flatnonzero(chosen & (calling != NOT_NESTED))
        inside = np.minimum(ends[called], ends[calling[called]]) - starts[called]
        within = np.bincount(calling[called], weights=inside, minlength=len(durations))
        return np.asarray(np.maximum(durations - within, 0), np.float64)

    def operations(self) -> Iterator[TraceOperation]:
        """Sum up our spans; those around a whole layer or step hold others, and are no operations."""
        around = innermost(self._parent, self._is_span)
        inside = around[self._is_operator & (around != NOT_NESTED)]
        num_operators = np.bincount(inside, minlength=len(around))
        sums: dict[tuple[int, str], list[int]] = {}
        for event in np.flatnonzero(self._is_span).tolist():
            name = self._trace.name_of(event)
            if name != STEP and not _LAYER.match(name):
                total = sums.setdefault((int(self._phase[event]), _LAYER_PREFIX.sub("", name)), [0, 0, 0])
                total[0] += 1
                total[1] += int(num_operators[event])
                total[2] += int(self._trace.duration_ns[event])
        for (phase, name), (count, operators, total_ns) in sums.items():
            yield TraceOperation(
                name=name,
                phase=self._phase_name(phase),
                count=count,
                num_operators=operators,
                total_us=total_ns / 1e3,
            )

    def _grouped(self, events: NDArray[np.int64], self_ns: NDArray[np.float64], device: str) -> Iterator[TraceOperator]:
        """Yield one sum for each phase and name."""
        names = [_ADDRESS.sub("", name) for _, name in self._trace.labels]
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        name_of_label = np.array([number[name] for name in names], np.int64)
        keys = (self._phase[events] + 1) * max(1, len(number)) + name_of_label[self._trace.label[events]]
        groups, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
        total_ns = np.bincount(group, weights=self._trace.duration_ns[events], minlength=len(groups))
        own_ns = np.bincount(group, weights=self_ns[events], minlength=len(groups))
        by_number = list(number)
        for key, count, total, self_ns_sum in zip(groups, counts, total_ns, own_ns, strict=True):
            phase, name = divmod(int(key), len(number))
            yield TraceOperator(
                name=by_number[name],
                short_name=readable(by_number[name]) if device == "gpu" else by_number[name],
                category=category_of(by_number[name]) if device == "gpu" else None,
                phase=self._phase_name(phase - 1),
                device=device,
                count=int(count),
                total_us=float(total) / 1e3,
                self_us=float(self_ns_sum) / 1e3,
            )

    def _phase_name(self, number: int) -> str | None:
        return None if number < 0 else self._phase_names[number]


def _is_span(category: str, name: str) -> bool:
    """Whether events are spans of ours: annotations, and operators in traces of before."""
    return category in ("cpu_op", "user_annotation") and bool(SPAN.match(name))
