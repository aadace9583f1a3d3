"""Two traces, one against the other: steps of like size, where the time of a step went, and what runs more often."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from pathlib import Path
from statistics import median

from harness.base.memory import collecting_no_garbage
from harness.profiling.trace.explain import explain
from harness.profiling.trace.file import read_trace
from harness.profiling.trace.phases import find_steps, like_steps
from harness.profiling.trace.summary import summarize_trace
from harness.results.trace import OperatorChange, PhaseChange, StepFigure, TraceDiff, TraceStep, TraceSummary


def diff_files(before: Path, after: Path, phase_pattern: re.Pattern[str] | None = None) -> TraceDiff:
    """Read two traces and compare their steps of like size.

    Raises:
        HarnessError: as `read_trace`.
    """
    with collecting_no_garbage():
        traces = read_trace(before), read_trace(after)
        old_steps, new_steps, unlike = like_steps(*(find_steps(trace, phase_pattern) for trace in traces))
        old, new = (
            summarize_trace(trace, str(path), steps=steps, with_host=True)
            for trace, path, steps in zip(traces, (before, after), (old_steps, new_steps), strict=True)
        )
    return diff_traces(old, new, unlike)


def diff_traces(before: TraceSummary, after: TraceSummary, unlike: Sequence[str] = ()) -> TraceDiff:
    """Compare two summaries; what is the same to the last event and nanosecond is left out."""
    diff = TraceDiff(
        before=before,
        after=after,
        sentence="",
        phases=tuple(_phases(before.steps, after.steps)),
        unlike=tuple(unlike),
        changes=tuple(sorted(_changes(before, after), key=lambda row: (not row.is_of_count, -abs(row.added_us)))),
    )
    return replace(diff, sentence=explain(diff))


def _phases(before: Sequence[TraceStep], after: Sequence[TraceStep]) -> Iterator[PhaseChange]:
    for phase in dict.fromkeys(step.phase for step in before):
        old, new = ([step for step in side if step.phase == phase] for side in (before, after))
        if new:
            yield PhaseChange(
                phase=phase,
                num_steps_before=len(old),
                num_steps_after=len(new),
                sizes_before=_sizes(old),
                sizes_after=_sizes(new),
                measures=tuple(_measures(old, new)),
            )


def _sizes(steps: Iterable[TraceStep]) -> tuple[str, ...]:
    return tuple(size for size, _ in Counter(step.size for step in steps if step.size).most_common())


def _measures(before: Sequence[TraceStep], after: Sequence[TraceStep]) -> Iterator[StepFigure]:
    for name in dict.fromkeys(name for step in (*before, *after) for name in step.figures):
        old, new = ([step.figures.get(name, 0.0) for step in side] for side in (before, after))
        noise = hypot(_spread(old), _spread(new)) if len(old) > 1 and len(new) > 1 else None
        yield StepFigure(name=name, before=median(old), after=median(new), noise=noise)


_FEW, _LEAST = 5, 0.03
"""So few steps may be alike by chance: their noise is at least this share."""
_DEVIATIONS = 2.5 * 1.2533 * 1.4826
"""2.5 standard errors of a median, by the median absolute deviation: one step that is far off hides no change."""


def _spread(values: Sequence[float]) -> float:
    """Return how far the median of such values may be from that of another run."""
    middle = median(values)
    spread = float(_DEVIATIONS * median(abs(value - middle) for value in values) / len(values) ** 0.5)
    return max(spread, _LEAST * abs(middle)) if len(values) < _FEW and max(values) > min(values) else spread


_Key = tuple[str | None, str, str]
"""Phase, kind and name of a row."""


@dataclass(slots=True)
class _Row:
    short_name: str
    category: str | None
    count: int
    self_us: float


def _rows(summary: TraceSummary) -> dict[_Key, _Row]:
    """Return what ran; operations and modules count the operators in them."""
    rows = {
        (row.phase, row.device, row.name): _Row(row.short_name, row.category, row.count, row.self_us)
        for row in (*summary.operators, *summary.host)
    }
    for operation in summary.operations:
        key = operation.phase, "operation", operation.name
        rows[key] = _Row(operation.name, None, operation.num_operators, operation.total_us)
    for module in summary.modules:
        rows[None, "module", module.path] = _Row(module.path, None, module.num_operators, module.total_us)
    return rows


_VARIABLE = {"call": re.compile(r"^(?:cuda|hip)(?=[A-Z])"), "python": re.compile(r"\(\d+\)(?=: )")}
"""What differs in the name of one call or function: the vendor's prefix, and the line in another version of a file."""


def _renamed(old_rows: Mapping[_Key, _Row], new_rows: Mapping[_Key, _Row]) -> Iterator[tuple[_Key, _Key]]:
    """Yield the names before and after of what only the variable part of a name tells apart."""
    groups: dict[_Key, tuple[list[_Key], list[_Key]]] = {}
    for side, (rows, others) in enumerate(((old_rows, new_rows), (new_rows, old_rows))):
        for phase, device, name in (key for key in rows if key not in others and key[1] in _VARIABLE):
            group = groups.setdefault((phase, device, _VARIABLE[device].sub("", name)), ([], []))
            group[side].append((phase, device, name))
    for old, new in groups.values():
        if len(old) == len(new):  # functions of one name in a file stay in order
            yield from zip(sorted(old, key=_in_file), sorted(new, key=_in_file), strict=True)


def _in_file(key: _Key) -> tuple[int, str]:
    number = re.search(r"\((\d+)\): ", key[2])
    return int(number[1]) if number else 0, key[2]


def _changes(before: TraceSummary, after: TraceSummary) -> Iterator[OperatorChange]:
    counts = [{phase.name: phase.count for phase in side.phases} for side in (before, after)]
    old_rows, new_rows = _rows(before), _rows(after)
    for old_key, new_key in tuple(_renamed(old_rows, new_rows)):
        old_rows[new_key] = old_rows.pop(old_key)
    for key in dict.fromkeys([*old_rows, *new_rows]):
        phase, device, name = key
        row = new_rows.get(key) or old_rows[key]
        none = _Row(row.short_name, row.category, 0, 0.0)
        old, new = old_rows.get(key, none), new_rows.get(key, none)
        change = OperatorChange(
            phase=phase,
            name=name,
            short_name=row.short_name,
            category=row.category,
            device=device,
            count_before=old.count,
            count_after=new.count,
            self_us_before=old.self_us,
            self_us_after=new.self_us,
            num_steps_before=counts[0].get(phase or "", 1),
            num_steps_after=counts[1].get(phase or "", 1),
        )
        if change.is_of_count or change.self_us_before != change.self_us_after:
            yield change
