"""A Chrome trace of torch, counted and summed up by phase, operation and operator."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.base.garbage import collecting_no_garbage
from harness.profiling.span_names import SPAN, STEP
from harness.profiling.trace.device import device_activity, is_of_device, launch_of
from harness.profiling.trace.file import Trace, read_trace
from harness.profiling.trace.modules import module_times
from harness.profiling.trace.nesting import NOT_NESTED, innermost, nest
from harness.profiling.trace.products import matrix_products
from harness.results.trace import TraceOperation, TraceOperator, TracePhase, TraceSummary

# Capitals are of older versions of torch; lists of events that are not the profiler's own have no category.
_OPERATOR_CATEGORIES = {"cpu_op", "Operator", ""}
_STATED_PHASE = re.compile(r"([^\[\]]+)\[.*\]$")
"""A step that says what it computes: `decode[bs=1 toks=1 kv=128]`."""
_STEP_NUMBER = re.compile(r"#\d+$")
_LAYER_PREFIX = re.compile(r"^model\.layers\.\d+\.")
_LAYER = re.compile(r"^model\.layers\.\d+$")


def summarize(path: Path, phase_pattern: re.Pattern[str] | None = None) -> TraceSummary:
    """Read a trace and sum it up.

    Events whose names match `phase_pattern` are steps; its first group is the phase, or the whole match. None: what the
    annotations say.

    Raises:
        HarnessError: as `read_trace`.
    """
    with collecting_no_garbage():
        return summarize_trace(read_trace(path), str(path), phase_pattern)


def summarize_trace(trace: Trace, path: str, phase_pattern: re.Pattern[str] | None = None) -> TraceSummary:
    """Sum up a trace that has been read."""
    columns = _Columns(trace, phase_pattern)
    modules, module_kernels = module_times(trace)
    return TraceSummary(
        path=path,
        num_events=trace.num_events,
        duration_us=columns.duration_us,
        phases=tuple(columns.phases()),
        operators=tuple(sorted(columns.operators(), key=lambda operator: operator.self_us, reverse=True)),
        operations=tuple(columns.operations()),
        modules=modules,
        module_kernels=module_kernels,
        products=matrix_products(trace),
        devices=device_activity(trace),
        rank=trace.rank,
    )


class _Columns:
    """A trace's columns, and those that follow from them."""

    def __init__(self, trace: Trace, phase_pattern: re.Pattern[str] | None) -> None:
        self._trace = trace
        self._is_span = trace.are(_is_span)
        self._is_operator = trace.are(lambda category, _: category in _OPERATOR_CATEGORIES) & ~self._is_span
        self._is_kernel = trace.are(is_of_device)
        self._is_timed = trace.are(lambda category, _: category != "Trace")
        self._spans = phase_spans(trace) if phase_pattern is None else _matching_spans(trace, phase_pattern)
        self._phase_names = tuple(dict.fromkeys(name for _, name in self._spans))
        self._phase = self._phases_of_events()
        self._parent = nest(trace, np.flatnonzero(self._is_operator | self._is_span))

    @property
    def duration_us(self) -> float:
        """Time from the first event to the end of the last; the profiler's own span around all of them is left out."""
        start, end = self._trace.start_ns[self._is_timed], self._trace.end_ns[self._is_timed]
        return float((end.max() - start.min()) / 1e3) if len(start) else 0.0

    def phases(self) -> Iterator[TracePhase]:
        durations: dict[str, list[int]] = {name: [] for name in self._phase_names}
        for event, name in self._spans:
            durations[name].append(int(self._trace.duration_ns[event]))
        for name, found in durations.items():
            yield TracePhase(name=name, count=len(found), total_us=sum(found) / 1e3)

    def operators(self) -> Iterator[TraceOperator]:
        starts, durations, ends = self._trace.start_ns, self._trace.duration_ns, self._trace.end_ns
        calling = innermost(self._parent, self._is_operator)
        called = np.flatnonzero(self._is_operator & (calling != NOT_NESTED))
        inside = np.minimum(ends[called], ends[calling[called]]) - starts[called]
        within = np.bincount(calling[called], weights=inside, minlength=len(durations))
        own = np.maximum(durations - within, 0)
        yield from self._grouped(np.flatnonzero(self._is_operator), own, "cpu")
        yield from self._grouped(np.flatnonzero(self._is_kernel), own, "gpu")

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
        names = [name for _, name in self._trace.labels]
        number = {name: index for index, name in enumerate(dict.fromkeys(names))}
        name_of_label = np.array([number[name] for name in names], np.int64)
        keys = (self._phase[events] + 1) * max(1, len(number)) + name_of_label[self._trace.label[events]]
        groups, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
        total_ns = np.bincount(group, weights=self._trace.duration_ns[events], minlength=len(groups))
        own_ns = np.bincount(group, weights=self_ns[events], minlength=len(groups))
        by_number = list(number)
        for key, count, total, own in zip(groups, counts, total_ns, own_ns, strict=True):
            phase, name = divmod(int(key), len(number))
            yield TraceOperator(
                name=by_number[name],
                phase=self._phase_name(phase - 1),
                device=device,
                count=int(count),
                total_us=float(total) / 1e3,
                self_us=float(own) / 1e3,
            )

    def _phase_name(self, number: int) -> str | None:
        return None if number < 0 else self._phase_names[number]

    def _phases_of_events(self) -> NDArray[np.int64]:
        """Return the number of each event's phase, -1 outside: by time on the CPU, on the GPU by what launched it."""
        trace = self._trace
        phase = np.full(len(trace.label), NOT_NESTED)
        process = trace.processes[trace.thread] if len(trace.processes) else np.zeros(0, np.int32)
        on_cpu = np.flatnonzero(~self._is_kernel)
        on_cpu = on_cpu[np.argsort(trace.start_ns[on_cpu], kind="stable")]
        starts = trace.start_ns[on_cpu]
        numbers = {name: number for number, name in enumerate(self._phase_names)}
        for span, name in self._spans:  # those further inside come later, and win
            begin = trace.start_ns[span]
            low, high = np.searchsorted(starts, (begin, begin + trace.duration_ns[span]))
            covered = on_cpu[low:high]
            phase[covered[process[covered] == process[span]]] = numbers[name]
        kernels = np.flatnonzero(self._is_kernel)
        launch = launch_of(trace, kernels)
        phase[kernels[launch >= 0]] = phase[launch[launch >= 0]]
        return phase


def phase_spans(trace: Trace) -> list[tuple[int, str]]:
    """Return the events that are steps of a phase, and the phase of each, in order of their start.

    Where some annotations say what a step computes, only these count. Elsewhere every annotation does, without the
    number of the step.
    """
    is_phase = trace.are(lambda category, name: category == "user_annotation" and not _is_span(category, name))
    events = np.flatnonzero(is_phase)
    events = events[np.lexsort((-trace.duration_ns[events], trace.start_ns[events]))]
    names = list(map(trace.name_of, events.tolist()))
    stated = [_STATED_PHASE.match(name) for name in names]
    if any(stated):
        return [(int(event), match[1]) for event, match in zip(events, stated, strict=True) if match]
    return [(int(event), _STEP_NUMBER.sub("", name)) for event, name in zip(events, names, strict=True)]


def _matching_spans(trace: Trace, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return the events of the CPU whose names match, and the phase of each, in order of their start."""
    is_step = trace.are(lambda category, name: not is_of_device(category, name) and pattern.search(name))
    events = np.flatnonzero(is_step)
    events = events[np.lexsort((-trace.duration_ns[events], trace.start_ns[events]))]
    found = []
    for event in events.tolist():
        match = pattern.search(trace.name_of(event))
        assert match is not None
        found.append((event, (match[1] if pattern.groups else None) or match[0]))
    return found


def _is_span(category: str, name: str) -> bool:
    """Whether events are spans of ours: annotations, and operators in traces of before."""
    return category in ("cpu_op", "user_annotation") and bool(SPAN.match(name))
