"""The page's view of a profile: latencies, a bar for each phase, time and memory by operation, and the roofline.

The roofline shows what operations reach, under what the machine can do (Williams, Waterman, Patterson 2009).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from harness.errors import printable
from harness.report.check.sentences import model_name
from harness.report.check.table import count, number
from harness.report.page.memory_view import memory_plot, num_bytes
from harness.report.page.plot import Dot, Line, Plot, log_scale, polyline
from harness.report.profile import bound_text
from harness.results.profile import Ceilings, Percentiles, PhaseProfile, ProfileResult, RooflinePoint, TableRow

_LABEL_WIDTH, _LABEL_HEIGHT = 6.0, 5.0
"""Percent of a narrow plot that a number takes."""
_SIDES = {"right": (1, 0), "left": (-1, 0), "above": (0, 1), "below": (0, -1)}


def roofline_plot(phase: PhaseProfile, roofs: Ceilings) -> Plot | None:
    """Plot a phase and its operations; None if nothing has FLOPs and a time."""
    points = [(point, rate) for point in phase.roofline if (rate := _rate(point)) and point.intensity > 0]
    if not points:
        return None
    peak = roofs.matmul_flops_per_s
    ridge = peak / roofs.copy_bytes_per_s
    x = log_scale([*(point.intensity for point, _ in points), ridge / 3, ridge * 3], least_decades=2)
    y = log_scale([*(rate for _, rate in points), peak], least_decades=2)
    # The slanted roof enters at the left edge, or at the floor if that is higher.
    start = max(x.low, y.low / roofs.copy_bytes_per_s)
    roof = [(start, start * roofs.copy_bytes_per_s), (ridge, peak), (x.high, peak)]
    points.sort(key=lambda pair: (pair[0].name != phase.name, -pair[0].flops))
    places = [(x.at(point.intensity), y.at(rate)) for point, rate in points]
    sides = _sides(places)
    return Plot(
        x_ticks=x.ticks(lambda value: f"{value:g}"),
        y_ticks=y.ticks(_flops),
        x_label="FLOPs per byte",
        y_label="FLOP/s",
        lines=(Line(path=polyline((x.at(at), y.at(rate)) for at, rate in roof), style="roof"),),
        dots=tuple(
            Dot(
                x=at,
                y=height,
                style="whole" if point.name == phase.name else "",
                title=printable(_title(point, rate)),
                label=str(number),
                name=printable(point.name),
                side=side,
            )
            for number, ((point, rate), (at, height), side) in enumerate(zip(points, places, sides, strict=True), 1)
        ),
    )


def _sides(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return for each dot the side where its number covers no other number and no other dot, if there is one."""
    taken = list(places)
    sides = []
    for x, y in places:
        centres = {side: (x + right * _LABEL_WIDTH, y + up * _LABEL_HEIGHT) for side, (right, up) in _SIDES.items()}
        side = max(centres, key=lambda name: (_room(centres[name], taken, (x, y)), -list(_SIDES).index(name)))
        taken.append(centres[side])
        sides.append(side)
    return sides


def _room(centre: tuple[float, float], taken: Sequence[tuple[float, float]], dot: tuple[float, float]) -> float:
    """Return the distance to the nearest number or dot in labels, at most 1; 0 outside the plot."""
    if not (0 <= centre[0] <= 100 and 0 <= centre[1] <= 100):
        return 0.0
    others = (place for place in taken if place != dot)
    away = (max(abs(centre[0] - x) / _LABEL_WIDTH, abs(centre[1] - y) / _LABEL_HEIGHT) for x, y in others)
    return min(1.0, min(away, default=1.0))


def _rate(point: RooflinePoint) -> float:
    return point.flops / (point.time_us * 1e-6) if point.time_us else 0.0


def _title(point: RooflinePoint, rate: float) -> str:
    return f"{point.name} · {_flops(rate)} at {number(point.intensity)} FLOPs per byte · bound by {point.bound_by}"


def _flops(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}FLOP/s"
    return f"{value:.3g} FLOP/s"


MAX_OPERATORS = 25
_MAX_PARTS = 8
"""Operations with their own colour, the same in every phase; the rest share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One operation's part of a phase's bar."""

    label: str
    percent: float
    style: str


View = dict[str, Any]
"""What a template is given, by name."""


def profile_view(result: ProfileResult) -> View:
    """Return what the template of a profile is given."""
    longest = max((_ms_per_step(phase) for phase in result.phases), default=1.0)
    subject = (result.engine, model_name(result.model), result.dtype, result.device)
    return {
        "subject": tuple(map(printable, subject)),
        "work": f"{count(result.batch_size, 'request')} of {result.up_to}{result.num_prompt_tokens:,} tokens, "
        f"{result.up_to}{result.max_new_tokens:,} new ones each",
        "latencies": (
            *_latency("time to first token", result.ttft_ms),
            *_latency("time per output token", result.tpot_ms),
            *_latency("between two tokens", result.inter_token_ms),
            ("throughput", f"{number(result.tokens_per_second)} tok/s", "prompts included"),
        ),
        "phases": tuple(_phase(phase, result, longest) for phase in result.phases),
        "legend": _legend(result.phases),
        "facts": tuple(_facts(result)),
        "notes": tuple(map(printable, result.notes)),
    }


def _legend(phases: Sequence[PhaseProfile]) -> tuple[BarPart, ...]:
    """Return each colour once."""
    parts = {part.style: part for phase in phases for part in _parts(phase.operations, _colors(phases))}
    return tuple(parts[style] for style in sorted(parts))


def _latency(name: str, percentiles: Percentiles | None) -> tuple[tuple[str, str, str], ...]:
    if percentiles is None:
        return ()
    rest = f"p90 {number(percentiles.p90)}, p99 {number(percentiles.p99)} of {percentiles.num_samples:,}"
    return ((name, f"{number(percentiles.median)} ms", rest),)


def _facts(result: ProfileResult) -> list[tuple[str, str]]:
    cost, roofs = result.overhead, result.ceilings
    memory = "" if cost.memory is None else f"memory {number(cost.memory)}, "
    passes = f"trace {number(cost.trace)}, {memory}counters {number(cost.counters)}"
    passes += " times the plain run"
    machine = f"copies {number(roofs.copy_bytes_per_s / 1e9)} GB/s, "
    machine += f"multiplies {number(roofs.matmul_flops_per_s / 1e9)} GFLOP/s"
    about = ", ".join(f"{name} {value}" for name, value in result.environment if value)
    return [("cost of the passes", passes), ("this machine", machine), ("under", printable(about))]


def _ms_per_step(phase: PhaseProfile) -> float:
    return phase.wall_ms / max(1, phase.num_steps)


def _phase(phase: PhaseProfile, result: ProfileResult, longest: float) -> View:
    per_step = _ms_per_step(phase)
    return {
        "name": printable(phase.name),
        "steps": count(phase.num_steps, "step"),
        "wall": f"{number(per_step)} ms",
        "percent": 100 * per_step / longest if longest else 0.0,
        "facts": tuple(_phase_facts(phase)),
        "parts": tuple(_parts(phase.operations, _colors(result.phases))),
        "tables": (
            _table("By layer", "layer", "identical layers in one row", phase.layers),
            _table("By operation", "operation", "over all layers", phase.operations),
            *(
                [_table("By operator", "operator", f"every event counted; the first {MAX_OPERATORS}", operators)]
                if (operators := phase.operators[:MAX_OPERATORS])
                else []
            ),
        ),
        "roofline": roofline_plot(phase, result.ceilings),
        "memory": memory_plot(phase.memory) if phase.memory else None,
        "links": tuple((PurePath(path).name, quote(path)) for path in (*phase.traces, phase.snapshot) if path),
        "notes": tuple(map(printable, phase.notes)),
    }


def _phase_facts(phase: PhaseProfile) -> list[tuple[str, str]]:
    return [
        ("bound by", bound_text(phase)),
        ("MFU", f"{phase.mfu:.1%}"),
        ("MBU", f"{phase.mbu:.1%}"),
        ("FLOPs", _against(number(phase.flops_measured / 1e6) + " M", phase.flops_measured, phase.flops_formula)),
        ("KV cache", _against(num_bytes(phase.kv_bytes_measured), phase.kv_bytes_measured, phase.kv_bytes_formula)),
        *([] if phase.peak_bytes is None else [("peak memory", num_bytes(phase.peak_bytes))]),
        ("operators", f"{sum(count.count for count in phase.counts):,}"),
        ("attributed", f"{phase.attributed_share:.1%}"),
    ]


def _against(shown: str, measured: int, formula: int) -> str:
    return (
        f"{shown}, as the formula"
        if measured == formula or not formula
        else f"{shown}, {number(measured / formula)} of the formula"
    )


def _colors(phases: Sequence[PhaseProfile]) -> dict[str, str]:
    """Return the style of the operations with the largest shares over all phases, in the order of computation."""
    shares: defaultdict[str, float] = defaultdict(float)
    for phase in phases:
        for row in phase.operations:
            shares[row.name] += row.share
    largest = set(sorted(shares, key=shares.__getitem__)[-_MAX_PARTS:])
    return {name: f"part-{index}" for index, name in enumerate(name for name in shares if name in largest)}


def _parts(rows: Sequence[TableRow], colors: Mapping[str, str]) -> list[BarPart]:
    parts = [
        BarPart(label=printable(row.name), percent=100 * row.share, style=colors[row.name])
        for row in rows
        if row.name in colors
    ]
    rest = 100 - sum(part.percent for part in parts)
    return [*parts, BarPart(label="all others", percent=max(0.0, rest), style="part-rest")]


def _table(title: str, first: str, note: str, rows: Sequence[TableRow]) -> View:
    return {
        "title": title,
        "note": note,
        "first": first,
        "lines": tuple(_line(row) for row in rows),
        "has_own": any(row.self_us != row.total_us for row in rows),
        "has_spread": any(row.num_collapsed > 1 for row in rows),
        "has_device": any(row.device_us is not None for row in rows),
    }


def _line(row: TableRow) -> View:
    spread = f"{row.spread[0]:,.0f} to {row.spread[1]:,.0f}" if row.spread and row.num_collapsed > 1 else ""
    return {
        "name": printable(row.name),
        "calls": f"{row.calls:,}",
        "total": f"{row.total_us:,.0f}",
        "own": f"{row.self_us:,.0f}",
        "share": f"{row.share:.1%}",
        "percent": max(0.0, min(100.0, 100 * row.share)),
        "spread": spread,
        "device": "" if row.device_us is None else f"{row.device_us:,.0f}",
    }
