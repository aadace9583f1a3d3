"""A gate's result for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from harness.errors import Code, printable
from harness.gate_results import GateChange, GateResult, GateVerdict, PairedRatio

MAX_ROWS = 30


def gate_text(result: GateResult, times: Mapping[str, PairedRatio]) -> str:
    """Return the verdict, every figure that changed, and the times of each phase where they were taken."""
    key = result.key
    parts = [f"{result.verdict.upper()}  {' · '.join(key[name] for name in ('engine', 'model', 'dtype', 'device'))}"]
    if result.changes:
        rows = [_row(change, result.verdict) for change in result.changes[:MAX_ROWS]]
        header = ["phase", "operation", "measure", "before", "after", "change", ""]
        aligned = ("left", "left", "left", "right", "right", "right", "left")
        parts.append(tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=aligned))
        left = len(result.changes) - MAX_ROWS
        parts += [f"and {left:,} more"] if left > 0 else []
    elif result.verdict is GateVerdict.PASS:
        parts.append("every count is the baseline's; FLOPs, bytes and peak are within 0.5 %")
    if result.verdict is GateVerdict.IMPROVED:
        parts.append("needs less than the baseline: --accept holds on to it")
    if times:
        parts.append(_times(times))
    return printable("\n\n".join(parts))


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


def _times(times: Mapping[str, PairedRatio]) -> str:
    rows = [
        [
            phase,
            f"{found.ratio.median:.3f}",
            f"{found.ratio.low:.3f} to {found.ratio.high:.3f}",
            f"{found.noise.median:.3f}",
            f"{found.noise.low:.3f} to {found.noise.high:.3f}",
            str(found.num_blocks),
            found.verdict.value,
        ]
        for phase, found in times.items()
    ]
    header = ["phase", "time", "95 %", "A/A", "95 %", "blocks", "verdict"]
    return tabulate(rows, header, tablefmt="simple", disable_numparse=True)
