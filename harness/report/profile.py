"""A profile for a terminal and as JSON: latencies, one line a phase, and where the time of each phase goes."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.document import document, plain
from harness.report.terminal import fitted_table
from harness.results.profile import Frame, Percentiles, PhaseProfile, ProfileResult, RooflinePoint, TableRow

MAX_OPERATORS = 12
"""Rows of the table by operator."""
_DISPENSABLE_FIGURES = ("KV MiB", "steps", "CPU ms", "GFLOP", "peak MiB", "MBU", "MFU")
_DISPENSABLE_TIMES = ("of one", "MB", "MFLOP", "calls", "self us", "GPU us", "us")
"""Columns that go on a narrow terminal, the first one first."""


def profile_text(result: ProfileResult, *, width: int | None = None) -> str:
    """Return the whole text, for a terminal of `width` columns; None: any width."""
    parts = [_head(result), _phases(result.phases, width), _overhead(result), *result.notes]
    parts += [_phase(phase, width) for phase in result.phases]
    return "\n\n".join(parts)


def _head(result: ProfileResult) -> str:
    what = f"{result.engine}, {result.model}, {result.dtype} on {result.device}"
    load = (
        f"{result.batch_size} x {result.up_to}{result.num_prompt_tokens} prompt tokens, "
        f"{result.up_to}{result.max_new_tokens} new tokens each: {result.tokens_per_second:.1f} tok/s"
    )
    rows = [
        [name, *_percentiles(percentiles)]
        for name, percentiles in (
            ("TTFT ms", result.ttft_ms), ("TPOT ms", result.tpot_ms), ("inter-token ms", result.inter_token_ms)
        )
    ]  # fmt: skip
    return "\n".join([what, load, "", fitted_table(rows, ["", "median", "p90", "p99"])])


def _percentiles(percentiles: Percentiles | None) -> list[str]:
    return (
        ["-"] * 3
        if percentiles is None
        else [f"{value:.3f}" for value in (percentiles.median, percentiles.p90, percentiles.p99)]
    )


def _phases(phases: Sequence[PhaseProfile], width: int | None) -> str:
    """Return a row for each phase; a formula has a column only where some count differs from it."""
    figures = [_figures(phase) for phase in phases]
    shown = [name for name in figures[0] if any(row[name] for row in figures)]
    rows, header = [[row[name] for name in shown] for row in figures], [name.strip() for name in shown]
    table = fitted_table(rows, header, width=width, dispensable=_DISPENSABLE_FIGURES)
    equal = [what for what, name in (("FLOPs", "formula"), ("K and V", "formula ")) if name not in shown]
    return f"{table}\n\ncounts that are equal to their formulas: {', '.join(equal)}" if equal else table


def _figures(phase: PhaseProfile) -> dict[str, str]:
    return {
        "phase": phase.name,
        "steps": str(phase.num_steps),
        "ms": f"{phase.wall_ms:.2f}",
        "CPU ms": "-" if phase.cpu_ms is None else f"{phase.cpu_ms:.2f}",
        "GFLOP": f"{phase.flops_measured / 1e9:.3f}",
        "formula": _against(phase.flops_measured, phase.flops_formula),
        "KV MiB": _mib(phase.kv_bytes_measured),
        "formula ": _against(phase.kv_bytes_measured, phase.kv_bytes_formula),
        "peak MiB": "" if phase.peak_bytes is None else _mib(phase.peak_bytes),
        "MFU": f"{phase.mfu:.1%}",
        "MBU": f"{phase.mbu:.1%}",
        "bound by": bound_text(phase),
    }


def bound_text(phase: PhaseProfile) -> str:
    """Return what a phase is bound by, with all candidates that the noise of its times allows."""
    return " or ".join(bound.value for bound in phase.bound_by_within_noise or (phase.bound_by,))


def _against(measured: int, formula: int) -> str:
    """Compare a measured count with its formula; empty if they are equal."""
    if measured == formula:
        return ""
    return f"x{measured / formula:.4f}" if formula else "none"


def _overhead(result: ProfileResult) -> str:
    cost, roofs = result.overhead, result.ceilings
    memory = "" if cost.memory is None else f"memory {cost.memory:.2f}, "
    return (
        f"cost of the passes, as a ratio to the plain run: trace {cost.trace:.2f}, {memory}"
        f"counters {cost.counters:.2f}\n"
        f"this machine: copy {roofs.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"matmul {roofs.matmul_flops_per_s / 1e9:.1f} GFLOP/s"
    )


def _phase(phase: PhaseProfile, width: int | None) -> str:
    title = f"{phase.name}: {phase.trace_wall_ms:.2f} ms in the trace, {phase.attributed_share:.1%} attributed"
    tables = (("layer", phase.layers), ("operation", phase.operations), ("operator", phase.operators[:MAX_OPERATORS]))
    costs = {point.name: point for point in phase.roofline[1:]}
    parts = [title]
    parts += [_rows(head, rows, width, costs if head == "operation" else {}) for head, rows in tables if rows]
    parts += [_peak(phase), *phase.notes]
    return "\n\n".join(part for part in parts if part)


def _rows(head: str, rows: Sequence[TableRow], width: int | None, costs: Mapping[str, RooflinePoint]) -> str:
    """Return a table with a title, without columns that repeat another one; `costs` are by formula."""
    has_own = any(row.self_us != row.total_us for row in rows)
    has_spread = any(row.num_collapsed > 1 for row in rows)
    has_device = any(row.device_us is not None for row in rows)
    lines = [
        [
            row.name,
            row.calls,
            f"{row.total_us:.0f}",
            *([f"{row.self_us:.0f}"] if has_own else []),
            f"{row.share:.1%}",
            *([_spread(row)] if has_spread else []),
            *([f"{row.device_us or 0:.0f}"] if has_device else []),
            *(_cost(costs.get(row.name)) if costs else []),
        ]
        for row in rows
    ]
    optional = [("self us", has_own), ("share", True), ("of one", has_spread), ("GPU us", has_device)]
    optional += [("MFLOP", bool(costs)), ("MB", bool(costs))]
    header = [head, "calls", "us", *(name for name, is_shown in optional if is_shown)]
    return f"by {head}\n\n{fitted_table(lines, header, width=width, dispensable=_DISPENSABLE_TIMES)}"


def _cost(point: RooflinePoint | None) -> list[str]:
    """Return FLOPs and bytes of an operation by formula, which host work has not."""
    return ["", ""] if point is None else [f"{point.flops / 1e6:,.3f}", f"{point.bytes_moved / 1e6:,.3f}"]


def _spread(row: TableRow) -> str:
    return "" if row.spread is None or row.num_collapsed == 1 else f"{row.spread[0]:.0f} to {row.spread[1]:.0f}"


def _peak(phase: PhaseProfile) -> str:
    memory = phase.memory
    if memory is None or memory.peak is None or memory.peak.stack is None:
        return ""
    peak, stack = memory.peak, memory.stacks[memory.peak.stack]
    lines = [f"peak of {_mib(peak.allocated_bytes)} MiB after {peak.time_us / 1e3:.2f} ms, in"]
    lines += [f"  {_frame(frame)}" for frame in stack[:6]]
    return "\n".join(lines)


def _frame(frame: Frame) -> str:
    return f"{frame.name}  {frame.filename}:{frame.line}" if frame.filename else frame.name


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


_IN_THE_FILE_ONLY = ("memory", "counts")


def profile_json(result: ProfileResult) -> dict[str, Any]:
    """Return the figures and the tables; memory over time and the stacks are in the file only."""
    whole = profile_document(result)
    for phase in whole["phases"]:
        for name in _IN_THE_FILE_ONLY:
            del phase[name]
    return whole


def profile_document(result: ProfileResult) -> dict[str, Any]:
    """Return the whole result."""
    whole = document(result)
    whole["prompt_tokens"] = whole.pop("num_prompt_tokens")
    phases = [_phase_values(phase) for phase in result.phases]
    return whole | {"environment": dict(result.environment), "phases": phases}


def _phase_values(phase: PhaseProfile) -> dict[str, Any]:
    return {
        **plain(phase),
        "num_steps": phase.num_steps,
        "trace": phase.traces[-1],
        "num_operators": sum(count.count for count in phase.counts),
        **{name: getattr(phase.memory, name, None) for name in ("num_allocations", "num_frees", "num_kept")},
        "steps": [plain(step) | {"label": step.label} for step in phase.steps],
    }
