"""A gate's result, for a terminal and for programs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from harness.errors import Code, printable
from harness.report.document import SCHEMA_VERSION, plain
from harness.results.gate import Clock, GateChange, GateResult, GateVerdict, PhaseTime

MAX_ROWS = 30
MAX_PLACES = 3
"""Functions that are named for each change."""


def gate_text(result: GateResult) -> str:
    """Return the verdict, every figure that changed, and the times of each phase if they were taken."""
    key = result.key
    said = " · ".join(f"{subject}: {verdict}" for subject, verdict in result.subjects.items())
    what = " · ".join(key[name] for name in ("engine", "model", "dtype", "device"))
    parts = [f"{result.verdict.upper()}  {what}\n{said}"]
    if result.changes:
        rows = [_row(change, result.verdict) for change in result.changes[:MAX_ROWS]]
        header = ["phase", "operation", "measure", "before", "after", "change", ""]
        aligned = ("left", "left", "left", "right", "right", "right", "left")
        parts.append(tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=aligned))
        left = len(result.changes) - MAX_ROWS
        parts += [f"and {left:,} more"] if left > 0 else []
        parts += _places(result.changes[:MAX_ROWS])
    elif not result.is_accepted:
        parts.append("every count is the baseline's; FLOPs, bytes and peak are within 0.5 %")
    if result.not_measured:
        parts.append(f"not measured, of this engine: {', '.join(result.not_measured)}")
    if result.verdict is GateVerdict.IMPROVED:
        parts.append("needs less than the baseline: --accept holds on to it")
    if result.is_accepted:
        parts.append("the profile is the baseline now")
    if result.times:
        parts.append(_times(result.times))
    return printable("\n\n".join(parts), keeps_lines=True)


def _row(change: GateChange, verdict: GateVerdict) -> list[str]:
    is_finding = change.is_regression and verdict is GateVerdict.REGRESSION
    return [
        change.phase,
        change.operation or "",
        change.measure,
        f"{change.before:,}",
        f"{change.after:,}",
        f"{change.after - change.before:+,}",
        Code.PERFORMANCE_REGRESSION.value if is_finding else "",
    ]


def _places(changes: Sequence[GateChange]) -> Iterator[str]:
    """Yield the callers of the operators that changed: the named operation may be a neighbour of the change."""
    lines = [
        f"  {change.phase} {change.operation} {change.measure}: {', '.join(change.places[:MAX_PLACES])}"
        for change in changes
        if change.places
    ]
    if lines:
        yield "\n".join(["called more or less often in", *lines])


def _times(times: Mapping[str, PhaseTime]) -> str:
    """Return a row for each phase and clock; the one that decides comes last, with the verdict."""
    rows = []
    for phase, time in times.items():
        for clock in sorted(Clock, key=lambda clock: clock is time.clock):
            ratio = time.cpu if clock is Clock.CPU else time.wall
            rows.append(
                [
                    phase,
                    clock.value,
                    f"{ratio.ratio.median:.3f}",
                    f"{ratio.ratio.low:.3f} to {ratio.ratio.high:.3f}",
                    f"{ratio.noise.median:.3f}",
                    f"{ratio.noise.low:.3f} to {ratio.noise.high:.3f}",
                    str(ratio.num_blocks),
                    time.verdict.value if clock is time.clock else "",
                ]
            )
    header = ["phase", "clock", "now/then", "99 %", "A/A", "99 %", "blocks", "verdict"]
    return tabulate(rows, header, tablefmt="simple", disable_numparse=True)


def gate_json(result: GateResult) -> dict[str, Any]:
    """Return the whole result."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.verdict,
        "subjects": dict(result.subjects),
        "key": result.key,
        "changes": plain(result.changes),
        "not_measured": list(result.not_measured),
        "times": {phase: plain(time.decisive) | plain(time) for phase, time in result.times.items()},
    }
