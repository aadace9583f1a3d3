"""Changes between two traces: how often each operator ran, then how long, by phase."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from harness.results.trace import (
    OperationChange,
    OperatorChange,
    TraceDiff,
    TraceModule,
    TraceOperation,
    TraceOperator,
    TraceSummary,
)

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
    for found in dict.fromkeys([*old, *new]):
        yield found, old.get(found), new.get(found)


def _operator_size(change: OperatorChange) -> tuple[int, float]:
    return abs(change.count_after - change.count_before), abs(change.self_us_after - change.self_us_before)


def _operation_size(change: OperationChange) -> tuple[int, int, float]:
    return (
        abs(change.count_after - change.count_before),
        abs(change.num_operators_after - change.num_operators_before),
        abs(change.total_us_after - change.total_us_before),
    )
