"""What changed between two traces: how often each operator ran, then how long, by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from harness.profiling.trace_summary import TraceOperation, TraceOperator, TraceSummary

_Row = TypeVar("_Row", TraceOperation, TraceOperator)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """One operator or kernel within one phase, before and after; counts are 0 where it does not occur."""

    phase: str | None
    name: str
    device: str
    count_before: int
    count_after: int
    self_us_before: float
    self_us_after: float

    @property
    def is_of_count(self) -> bool:
        """Whether it runs more or less often: such a change is exact, one of time may be noise."""
        return self.count_before != self.count_after


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationChange:
    """One named operation within one phase, before and after."""

    phase: str | None
    name: str
    count_before: int
    count_after: int
    num_operators_before: int
    num_operators_after: int
    total_us_before: float
    total_us_after: float

    @property
    def is_of_count(self) -> bool:
        """Whether it runs, or what it calls runs, more or less often."""
        before = self.count_before, self.num_operators_before
        return before != (self.count_after, self.num_operators_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff:
    """Two traces, one against the other."""

    before: TraceSummary
    after: TraceSummary
    changes: tuple[OperatorChange, ...]
    """Changes of count first, then those of time alone; the largest first in either part."""
    operations: tuple[OperationChange, ...]
    """Likewise, for the spans of an engine that names its operations."""

    @property
    def steps(self) -> tuple[tuple[str, int, int], ...]:
        """Phase, steps before and steps after: unequal ones change every count."""
        before, after = ({phase.name: phase.count for phase in side.phases} for side in (self.before, self.after))
        return tuple((name, before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys([*before, *after]))


def diff_traces(before: TraceSummary, after: TraceSummary) -> TraceDiff:
    """Compare two summaries; what is the same to the last event and nanosecond is left out."""
    return TraceDiff(
        before=before,
        after=after,
        changes=tuple(sorted(_operators(before, after), key=_operator_size, reverse=True)),
        operations=tuple(sorted(_operations(before, after), key=_operation_size, reverse=True)),
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
