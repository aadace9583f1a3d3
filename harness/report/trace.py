"""Trace summaries and differences for a terminal and as JSON, and a flame graph as one page without a network."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from os.path import commonprefix
from typing import Any

from harness.errors import printable
from harness.report.document import SCHEMA_VERSION, plain
from harness.report.terminal import fitted_table
from harness.results.trace import (
    CriticalPath,
    DeviceActivity,
    FlameFrame,
    LinkKind,
    OperatorChange,
    PhaseChange,
    TraceDiff,
    TraceOperator,
    TraceSummary,
)

_IDLE = ("host_late_us", "queued_us", "in_graph_us", "other_us")
MAX_ROWS = 20
_MAX_RATES = 10
"""Rows of a table."""
MAX_SIZES = 5
"""Sizes of a phase that are shown."""
_FILE_WIDTH = 30
_NAME_WIDTH = 60
"""A kernel's name holds its template arguments, thousands of characters of them."""


def summary_text(summaries: Sequence[TraceSummary], *, peak_flops_per_s: float | None = None) -> str:
    """Return one block a file; rates of products as shares of a peak where one is passed."""
    parts = [*(_summary(summary, peak_flops_per_s) for summary in summaries), _devices(summaries), _graphs(summaries)]
    parts.append(_waits_for_ranks(summaries))
    return "\n\n".join(part for part in parts if part)


def _modules(summary: TraceSummary) -> str:
    """Return the modules as a tree: each under the one that calls it."""
    rows = [
        [
            *_cells("  " * module.path.count("/") + module.path.rpartition("/")[2], module.count),
            *_cells(module.num_operators, module.self_us, module.total_us),
            *(_cells(module.device_us) if summary.devices else []),
        ]
        for module in summary.modules
    ]
    header = ["module", "calls", "operators", "self us", "us", *(["GPU us"] if summary.devices else [])]
    return _limited(rows, header, num_names=1)


def _module_kernels(summary: TraceSummary) -> str:
    rows = [
        _cells(_shown(_innermost(kernel.path), 40), kernel.name, kernel.count, kernel.total_us)
        for kernel in summary.module_kernels
    ]
    return _limited(rows, ["module", "kernel", "count", "GPU us"])


def _innermost(path: str) -> str:
    """Return the last two modules of a path, which tell a projection of attention from one of the MLP."""
    return "/".join(path.split("/")[-2:])


def _rates(summary: TraceSummary, peak_flops_per_s: float | None) -> str:
    """Return what operators reached, as a share of the card's data sheet, or of a peak that was passed."""
    rows = [
        [
            *_cells(rate.name, rate.shapes, rate.count, rate.time_us),
            *_share(rate.flops_per_s, peak_flops_per_s or rate.peak_flops_per_s),
            *_share(rate.bytes_per_s, rate.peak_bytes_per_s),
        ]
        for rate in summary.rates[:_MAX_RATES]
    ]
    time = "GPU us" if any(rate.has_device for rate in summary.rates) else "us"
    return _limited(rows, ["operator", "shapes", "count", time, "TFLOP/s", "of peak", "TB/s", "of peak"])


def _share(per_s: float, peak_per_s: float | None) -> tuple[str, str]:
    """Return a rate in 10^12 a second, and as a share of the peak."""
    if not per_s:
        return "-", "-"
    return f"{per_s / 1e12:,.3g}", f"{per_s / peak_per_s:.0%}" if peak_per_s else "-"


def _devices(summaries: Sequence[TraceSummary]) -> str:
    """Return a row for each device of each trace: ranks side by side."""
    rows = []
    for summary in summaries:
        for device in summary.devices:
            idle_us = [sum(getattr(idle, name) for idle in device.idle) for name in _IDLE]
            launches, hidden = device.launches, device.communication
            busy = f"{device.busy_us / device.span_us:.1%}" if device.span_us else "-"
            delay = f"{launches.delay_us_median:,.1f}"
            rows.append(
                [
                    *_cells(_device_name(device, summary, summaries), device.span_us, busy, *idle_us),
                    *_cells(launches.num_launches, delay, launches.num_shorter_than_launch),
                    *(_cells(hidden.total_us, f"{hidden.hidden_share:.0%}") if hidden else ("-", "-")),
                ]
            )
    header = ["rank", "GPU span us", "busy", "host late us", "queued us", "in graph us", "other us"]
    header += ["launches", "delay us", "short", "comm us", "hidden"]
    num_unknown = sum(device.launches.num_unknown for summary in summaries for device in summary.devices)
    unknown = f"\n{num_unknown:,} kernels have no launching call in the trace: they are in no step and no phase"
    return fitted_table(rows, header) + (unknown if num_unknown else "") if rows else ""


def _trace_name(summary: TraceSummary, summaries: Sequence[TraceSummary]) -> str:
    """Return the rank of a trace, or its file where it has none, or the rank of another one."""
    if summary.rank is not None and [item.rank for item in summaries].count(summary.rank) == 1:
        return str(summary.rank)
    names, paths = [item.path.rpartition("/")[2] for item in summaries], [item.path for item in summaries]
    if len(set(names)) < len(set(paths)):  # a folder for each rank
        names = paths
    name = names[paths.index(summary.path)]
    is_cut = len(name) > _FILE_WIDTH and len(set(names)) > 1
    begin = len(commonprefix(names)) - 12 if is_cut else 0  # noqa: RUF071  characters of a name, no folders
    return _shown(f"…{name[begin:]}" if begin > 0 else name, _FILE_WIDTH)


def _device_name(device: DeviceActivity, summary: TraceSummary, summaries: Sequence[TraceSummary]) -> str:
    """Return the name of a trace, with that of the device if the trace has several."""
    name = _trace_name(summary, summaries)
    return f"{name} {_shown(device.name, _FILE_WIDTH)}" if len(summary.devices) > 1 else name


def _waits_for_ranks(summaries: Sequence[TraceSummary]) -> str:
    """Return how long ranks wait for each other in collectives, by durations: no clock needs to agree with another.

    A collective ends for all at once. The rank that comes last is in it for the shortest time, and the others wait.
    """
    ranks = [(device, summary) for summary in summaries for device in summary.devices]
    sides = [device.communication.durations_us if device.communication else {} for device, _ in ranks]
    if len(ranks) < 2 or not all(sides):
        return ""
    names = [name for name in sides[0] if len({len(side.get(name, ())) for side in sides}) == 1]
    waits = [0.0] * len(sides)
    for name in names:
        for together in zip(*(side[name] for side in sides), strict=True):
            waits = [wait + us - min(together) for wait, us in zip(waits, together, strict=True)]
    last, num_paired = waits.index(min(waits)), sum(len(sides[0][name]) for name in names)
    num_left = sum(len(us) for us in sides[0].values()) - num_paired
    rows = [[_device_name(*rank, summaries), f"{wait:,.0f}"] for rank, wait in zip(ranks, waits, strict=True)]
    whom = rows[last][0] if min(waits) < 0.5 * max(waits) else "each other in turn"
    text = f"in {num_paired:,} collectives that all have, ranks wait for {whom}, up to {max(waits) / 1e3:,.2f} ms"
    text += f"; {num_left:,} that not all have alike are left out" if num_left else ""
    return f"{text}\n\n{fitted_table(rows, ['rank', 'waits us'])}" if num_paired else ""


def _graphs(summaries: Sequence[TraceSummary]) -> str:
    """Return the replays of graphs: how long, how much of it idle, and which is the slowest."""
    rows = [
        [
            *_cells(_device_name(device, summary, summaries), graph.num_nodes, graph.count),
            *_cells(graph.call_us, graph.replay_us_median, graph.replay_us_max),
            *_cells(f"#{graph.slowest} at {graph.slowest_at_us / 1e3:,.2f} ms"),
            *_cells(graph.inside_idle_us, graph.between_idle_us),
        ]
        for summary in summaries
        for device in summary.devices
        for graph in device.graphs
    ]
    header = ["rank", "nodes a graph", "replays", "call us", "replay us", "slowest us", "slowest"]
    return _limited(rows, [*header, "idle inside us", "idle between us"], num_names=1)


def _summary(summary: TraceSummary, peak_flops_per_s: float | None) -> str:
    parts = [f"{_shown(summary.path, 200)}: {summary.num_events:,} events in {summary.duration_us / 1e3:,.2f} ms"]
    parts += [f"left out: {'; '.join(summary.left_out)}"] if summary.left_out else []
    if summary.phases:
        parts.append(_phases(summary))
    if summary.operations:
        operations = [
            _cells(row.phase, row.name, row.count, row.num_operators, row.total_us) for row in summary.operations
        ]
        parts.append(fitted_table(operations, ["phase", "operation", "count", "operators", "us"], num_names=2))
    parts += [_modules(summary), _module_kernels(summary), _rates(summary, peak_flops_per_s)]
    operators = [_cells(row.phase, row.short_name, row.count, row.self_us, row.total_us) for row in summary.operators]
    parts.append(_limited(operators, ["phase", "operator", "count", "self us", "us"]))
    return "\n\n".join(part for part in parts if part)


def _phases(summary: TraceSummary) -> str:
    """Return the phases, each with its most frequent sizes below it."""
    rows = []
    for phase in summary.phases:
        sizes = [size for size in phase.sizes if size.size]
        shown = sizes[0].size if len(sizes) == 1 else f"{len(sizes)} sizes" if sizes else ""
        rows.append([*_cells(phase.name, shown or None, phase.count, phase.total_us)])
        rows += [
            _cells(" ", f"  {item.size}", item.count, item.count * item.median_us)
            for item in sizes[:MAX_SIZES]
            if sizes[1:]
        ]
    processes = len({step.process for step in summary.steps})
    sums = f"\nthe steps, times and operators are sums over {processes} processes" if processes > 1 else ""
    return _limited(rows, ["phase", "size", "steps", "us"]) + sums


def summary_csv(summaries: Sequence[TraceSummary]) -> str:
    """Return a row for each operator, kernel and phase of each file."""
    rows = [{"path": summary.path, **plain(row)} for summary in summaries for row in summary.operators]
    return _csv(rows, ("path", *TraceOperator.__dataclass_fields__))


def diff_csv(diff: TraceDiff) -> str:
    """Return a row for each change between two traces."""
    return _csv(map(plain, diff.changes), tuple(OperatorChange.__dataclass_fields__))


def _csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    text = StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def critical_paths_text(paths: Sequence[CriticalPath]) -> str:
    """Return the critical path of each file."""
    return "\n\n".join(map(critical_path_text, paths))


def critical_path_text(path: CriticalPath) -> str:
    """Return what the duration is made of: by kind, then by name."""
    total_us = path.total_us or 1.0
    kinds = sorted(LinkKind, key=path.time_us, reverse=True)
    by_kind = [
        _cells(kind.value, path.time_us(kind), f"{path.time_us(kind) / total_us:.1%}")
        for kind in kinds
        if path.time_us(kind)
    ]
    by_name = [
        _cells(link.kind.value, link.name, link.count, link.total_us, f"{link.total_us / total_us:.1%}")
        for link in path.links
    ]
    parts = [
        f"{_shown(path.path, 200)}: the critical path of {path.total_us / 1e3:,.2f} ms",
        fitted_table(by_kind, ["kind", "us", "share"]),
        _limited(by_name, ["kind", "name", "count", "us", "share"]),
    ]
    return "\n\n".join(part for part in parts if part)


def diff_text(diff: TraceDiff) -> str:
    """Return what made it slower, where the time of a step went, and what ran more often or took another time."""
    parts = [printable(diff.sentence)]
    parts += [
        f"{_shown(phase)}: the steps before and after are of other sizes, and all of them are compared"
        for phase in diff.unlike
    ]
    parts += [_phase_change(phase) for phase in diff.phases]
    for is_of_count in (True, False):
        rows = [_operator_change(row) for row in diff.changes if row.is_of_count == is_of_count]
        header = ["phase", "", "a step" if is_of_count else "longer or shorter", "count", "after", "self us", "after"]
        parts.append(_limited(rows, [*header, "change"], num_names=3))
    if not any(row.is_of_count for row in diff.changes):
        parts.append("every operator runs as often as before; times differ from run to run, and are no finding")
    return "\n\n".join(part for part in parts if part)


def _operator_change(row: OperatorChange) -> list[str]:
    counts = row.count_before / row.num_steps_before, row.count_after / row.num_steps_after
    times = row.self_us_before / row.num_steps_before, row.self_us_after / row.num_steps_after
    return [*_cells(row.phase, row.category or row.device, row.short_name), *map(_number, counts), *_change(*times)]


def _phase_change(phase: PhaseChange) -> str:
    """Return the figures of a step of one phase that changed, and the time of it in any case."""
    rows = [
        [
            measure.name,
            *map(_number, (measure.before, measure.after)),
            f"{'+' if measure.added > 0 else ''}{_number(measure.added)}",
            "-" if measure.noise is None else _number(measure.noise),
        ]
        for measure in phase.measures
        if measure.is_change or measure.name == "step us"
    ]
    return fitted_table(rows, [f"a step of {_shown(phase.phase)}", "before", "after", "change", "noise"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"


def _limited(rows: Sequence[Sequence[str]], header: Sequence[str], *, num_names: int = 2) -> str:
    left = len(rows) - MAX_ROWS
    more = f"\nand {left:,} more" if left > 0 else ""
    return f"{fitted_table(rows[:MAX_ROWS], header, num_names=num_names)}{more}" if rows else ""


def _cells(*values: str | float | None) -> list[str]:
    """Return the cells of a row: names, counts, and microseconds, which are floats."""
    return [_shown(value) if value is None or isinstance(value, str) else f"{value:,.0f}" for value in values]


def _change(before: float, after: float) -> list[str]:
    return [*_cells(before, after), f"{after - before:+,.0f}"]


def _shown(name: str | None, width: int = _NAME_WIDTH) -> str:
    """Return a name in one line of printable characters; a trace may be hostile."""
    text = printable(name or "-")
    return text if len(text) <= width else f"{text[: width - 1]}…"


def diff_json(diff: TraceDiff) -> dict[str, Any]:
    """Return what changed between two traces."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sentence": diff.sentence,
        "phases": plain(diff.phases),
        "unlike": list(diff.unlike),
        "changes": plain(diff.changes),
    }


LEAST_SHARE = 0.001
"""Of the whole: what is narrower is left out."""
_MAX_DEPTH = 200
_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #1c1d1f; --quiet: #6b6d70; }
@media (prefers-color-scheme: dark) { :root { --paper: #151617; --ink: #e4e3df; --quiet: #94979a; } }
body { margin: 0; padding: 1.5rem; background: var(--paper); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } p { color: var(--quiet); }
.flame { overflow-x: auto; } .flame > div { min-width: 40rem; }
.row { display: flex; } .frame { min-width: 0; }
.name { display: block; height: 1.15rem; margin: 0 1px 1px 0; padding: 0 .25rem; overflow: hidden; white-space: nowrap;
  text-overflow: ellipsis; font: 11px/1.15rem ui-monospace, monospace; color: #1c1d1f; border-radius: 1px; }
.c0 { background: #e8c27a; } .c1 { background: #dfa573; } .c2 { background: #86bbd8; } .c3 { background: #a9c9a4; }
"""


def flame_html(root: FlameFrame) -> str:
    """Return the page."""
    title = escape(printable(root.name))
    body = "".join(_frames(root, root.total_us or 1.0, 0))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{root.total_us / 1e3:,.2f} ms on the CPU, all threads; point at a frame for its time. "
        f'Frames below {LEAST_SHARE:.1%} are left out.</p><div class="flame"><div>{body}</div></div></html>\n'
    )


def _frames(outer: FlameFrame, whole_us: float, depth: int) -> Iterator[str]:
    """Yield what an outer frame calls, side by side, each with what it calls below."""
    children = [child for child in outer.children.values() if child.total_us >= LEAST_SHARE * whole_us]
    if not children or depth > _MAX_DEPTH:
        return
    yield '<div class="row">'
    for child in sorted(children, key=lambda child: -child.total_us):
        share = 100 * child.total_us / max(outer.total_us, sum(one.total_us for one in children))
        about = (
            f"{child.name} · {child.total_us / 1e3:,.3f} ms, {child.total_us / whole_us:.1%} · {child.count:,} times"
        )
        yield f'<div class="frame" style="width:{share:.3f}%">'
        yield f'<span class="name c{_color(child.name)}" title="{escape(printable(about))}">'
        yield f"{escape(printable(child.name))}</span>"
        yield from _frames(child, whole_us, depth + 1)
        yield "</div>"
    yield "</div>"


def _color(name: str) -> int:
    """Return a colour by kind: module, Python function, operator, anything else."""
    if name.startswith("nn.Module"):
        return 0
    return 2 if "::" in name else 1 if "): " in name else 3
