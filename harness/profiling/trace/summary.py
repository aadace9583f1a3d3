"""A Chrome trace of torch, summed up by phase, operation, operator and matrix product, and compared with another."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.base.files import parse_json
from harness.base.memory import collecting_no_garbage
from harness.profiling.trace.device import device_activity, is_of_device, launch_of
from harness.profiling.trace.file import Trace, read_trace
from harness.profiling.trace.nesting import NOT_NESTED, innermost, module_times, nest
from harness.profiling.trace.tables import SPAN, STEP
from harness.results.trace import (
    OperationChange,
    OperatorChange,
    TraceDiff,
    TraceModule,
    TraceOperation,
    TraceOperator,
    TracePhase,
    TraceProduct,
    TraceSummary,
)

_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1), "mkldnn::_linear_pointwise": (0, 1),
}  # fmt: skip
"""The two arguments that are multiplied."""


def matrix_products(trace: Trace) -> tuple[TraceProduct, ...]:
    """Return the products whose shapes the trace has (`record_shapes=True`), those that take longest first."""
    is_product = trace.are(lambda _, name: name in _PRODUCTS)
    events = np.flatnonzero(is_product & (trace.shape > 0))
    if not len(events):
        return ()
    kernel_ns = _kernel_ns(trace, is_product)
    sums: dict[tuple[str, str], list[float]] = {}
    for event in events.tolist():
        key = trace.name_of(event), trace.shapes[trace.shape[event]]
        total = sums.setdefault(key, [0, 0, 0])
        total[0] += 1
        total[1] += int(trace.duration_ns[event])
        total[2] += int(kernel_ns[event])
    has_device = bool(kernel_ns.any())
    products = [_product(name, shapes, total, has_device) for (name, shapes), total in sums.items()]
    return tuple(
        sorted((product for product in products if product), key=lambda product: product.time_us, reverse=True)
    )


def _kernel_ns(trace: Trace, is_product: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each event the time of the kernels that were launched in it."""
    kernels = np.flatnonzero(trace.are(is_of_device))
    launch = launch_of(trace, kernels)
    kernels, launch = kernels[launch >= 0], launch[launch >= 0]
    kernel_ns = np.zeros(len(trace.label), np.int64)
    if len(kernels):
        events = np.unique(np.concatenate([np.flatnonzero(is_product), launch]))
        around = innermost(nest(trace, events), is_product)[launch]
        inside = around != NOT_NESTED
        np.add.at(kernel_ns, around[inside], trace.duration_ns[kernels[inside]])
    return kernel_ns


def _product(name: str, shapes: str, total: Sequence[float], has_device: bool) -> TraceProduct | None:
    flops = _flops(name, shapes)
    if flops is None:
        return None
    count, cpu_ns, kernel_ns = total
    time_us = (kernel_ns if has_device else cpu_ns) / 1e3
    return TraceProduct(
        name=name, shapes=shapes, count=int(count), time_us=time_us, flops=int(count) * flops, has_device=has_device
    )


def _flops(name: str, shapes: str) -> int | None:
    """Return 2 for each element of the result and of the inner dimension; None for shapes that are no product."""
    try:
        dims: list[Any] = parse_json(shapes)
        left, right = (dims[place] for place in _PRODUCTS[name])
        width = right[0] if name.startswith("mkldnn") else right[-1]
        return int(2 * np.prod(left, dtype=np.int64) * width)
    except (ValueError, IndexError, TypeError, OverflowError, KeyError):
        return None


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
        for name, durations_ns in durations.items():
            yield TracePhase(name=name, count=len(durations_ns), total_us=sum(durations_ns) / 1e3)

    def operators(self) -> Iterator[TraceOperator]:
        starts, durations, ends = self._trace.start_ns, self._trace.duration_ns, self._trace.end_ns
        calling = innermost(self._parent, self._is_operator)
        called = np.flatnonzero(self._is_operator & (calling != NOT_NESTED))
        inside = np.minimum(ends[called], ends[calling[called]]) - starts[called]
        within = np.bincount(calling[called], weights=inside, minlength=len(durations))
        self_ns = np.maximum(durations - within, 0)
        yield from self._grouped(np.flatnonzero(self._is_operator), self_ns, "cpu")
        yield from self._grouped(np.flatnonzero(self._is_kernel), self_ns, "gpu")

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
        for key, count, total, self_ns_sum in zip(groups, counts, total_ns, own_ns, strict=True):
            phase, name = divmod(int(key), len(number))
            yield TraceOperator(
                name=by_number[name],
                phase=self._phase_name(phase - 1),
                device=device,
                count=int(count),
                total_us=float(total) / 1e3,
                self_us=float(self_ns_sum) / 1e3,
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
    spans = []
    for event in events.tolist():
        match = pattern.search(trace.name_of(event))
        assert match is not None
        spans.append((event, (match[1] if pattern.groups else None) or match[0]))
    return spans


def _is_span(category: str, name: str) -> bool:
    """Whether events are spans of ours: annotations, and operators in traces of before."""
    return category in ("cpu_op", "user_annotation") and bool(SPAN.match(name))


_Row = TypeVar("_Row", TraceModule, TraceOperation, TraceOperator)


def diff_traces(before: TraceSummary, after: TraceSummary) -> TraceDiff:
    """Compare two summaries; what is the same to the last event and nanosecond is left out."""
    return TraceDiff(
        before=before,
        after=after,
        changes=tuple(sorted(_operators(before, after), key=_operator_size, reverse=True)),
        operations=tuple(sorted(_operations(before, after), key=_operation_size, reverse=True)),
        modules=tuple(sorted(_modules(before, after), key=_operation_size, reverse=True)),
    )


def _operators(before: TraceSummary, after: TraceSummary) -> Iterator[OperatorChange]:
    pairs = _paired(before.operators, after.operators, lambda row: (row.phase, row.name, row.device))
    for (phase, name, device), old, new in pairs:
        change = OperatorChange(
            phase=phase,
            name=name,
            device=device,
            count_before=old.count if old else 0,
            count_after=new.count if new else 0,
            self_us_before=old.self_us if old else 0.0,
            self_us_after=new.self_us if new else 0.0,
        )
        if change.is_of_count or change.self_us_before != change.self_us_after:
            yield change


def _operations(before: TraceSummary, after: TraceSummary) -> Iterator[OperationChange]:
    for (phase, name), old, new in _paired(before.operations, after.operations, lambda row: (row.phase, row.name)):
        yield from _changed(phase, name, old, new)


def _modules(before: TraceSummary, after: TraceSummary) -> Iterator[OperationChange]:
    for path, old, new in _paired(before.modules, after.modules, lambda module: module.path):
        yield from _changed(None, path, old, new)


def _changed(
    phase: str | None, name: str, old: TraceOperation | TraceModule | None, new: TraceOperation | TraceModule | None
) -> Iterator[OperationChange]:
    """Yield how an operation or a module changed, if it did."""
    change = OperationChange(
        phase=phase,
        name=name,
        count_before=old.count if old else 0,
        count_after=new.count if new else 0,
        num_operators_before=old.num_operators if old else 0,
        num_operators_after=new.num_operators if new else 0,
        total_us_before=old.total_us if old else 0.0,
        total_us_after=new.total_us if new else 0.0,
    )
    if change.is_of_count or change.total_us_before != change.total_us_after:
        yield change


_Key = TypeVar("_Key")


def _paired(
    before: Iterable[_Row], after: Iterable[_Row], key: Callable[[_Row], _Key]
) -> Iterator[tuple[_Key, _Row | None, _Row | None]]:
    old: dict[_Key, _Row] = {key(row): row for row in before}
    new: dict[_Key, _Row] = {key(row): row for row in after}
    for row_key in dict.fromkeys([*old, *new]):
        yield row_key, old.get(row_key), new.get(row_key)


def _operator_size(change: OperatorChange) -> tuple[int, float]:
    return abs(change.count_after - change.count_before), abs(change.self_us_after - change.self_us_before)


def _operation_size(change: OperationChange) -> tuple[int, int, float]:
    return (
        abs(change.count_after - change.count_before),
        abs(change.num_operators_after - change.num_operators_before),
        abs(change.total_us_after - change.total_us_before),
    )
