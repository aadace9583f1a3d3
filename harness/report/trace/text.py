"""Trace summaries and differences for a terminal."""

from collections.abc import Sequence

from tabulate import tabulate

from harness.results.trace import CriticalPath, LinkKind, TraceDiff, TraceSummary

_IDLE = ("host_late_us", "queued_us", "other_us")
MAX_ROWS = 20
_MAX_PRODUCTS = 10
"""Rows of a table."""
_NAME_WIDTH = 60
"""A kernel's name holds its template arguments, thousands of characters of them."""


def summary_text(summaries: Sequence[TraceSummary], *, peak_flops_per_s: float | None = None) -> str:
    """Return one block a file; products as shares of a peak where one is given."""
    parts = [*(_summary(summary, peak_flops_per_s) for summary in summaries), _devices(summaries)]
    return "\n\n".join(part for part in parts if part)


def _modules(summary: TraceSummary) -> str:
    """Return the modules as a tree: each under the one that calls it."""
    rows = [
        [
            _shown("  " * module.path.count("/") + module.path.rpartition("/")[2]),
            f"{module.count:,}",
            f"{module.num_operators:,}",
            f"{module.self_us:,.0f}",
            f"{module.total_us:,.0f}",
            *([f"{module.device_us:,.0f}"] if summary.devices else []),
        ]
        for module in summary.modules
    ]
    header = ["module", "calls", "operators", "self us", "us", *(["GPU us"] if summary.devices else [])]
    return _limited(rows, header, num_names=1)


def _module_kernels(summary: TraceSummary) -> str:
    rows = [
        [_shown(_innermost(kernel.path), 40), _shown(kernel.name), f"{kernel.count:,}", f"{kernel.total_us:,.0f}"]
        for kernel in summary.module_kernels
    ]
    return _limited(rows, ["module", "kernel", "count", "GPU us"])


def _innermost(path: str) -> str:
    """Return the last two modules of a path, which tell a projection of attention from one of the MLP."""
    return "/".join(path.split("/")[-2:])


def _products(summary: TraceSummary, peak_flops_per_s: float | None) -> str:
    rows = [
        [
            _shown(product.name),
            _shown(product.shapes),
            f"{product.count:,}",
            f"{product.time_us:,.0f}",
            f"{product.flops_per_s / 1e9:,.1f}",
            *([f"{product.flops_per_s / peak_flops_per_s:.1%}"] if peak_flops_per_s else []),
        ]
        for product in summary.products[:_MAX_PRODUCTS]
    ]
    time = "GPU us" if any(product.has_device for product in summary.products) else "us"
    return _limited(rows, ["product", "shapes", "count", time, "GFLOP/s", *(["of peak"] if peak_flops_per_s else [])])


def _devices(summaries: Sequence[TraceSummary]) -> str:
    """Return a row for each device of each trace: ranks side by side."""
    rows = []
    for summary in summaries:
        for found in summary.devices:
            idle_us = [sum(getattr(idle, name) for idle in found.idle) for name in _IDLE]
            hidden = found.communication
            rows.append(
                [
                    "-" if summary.rank is None else str(summary.rank),
                    f"{found.span_us:,.0f}",
                    f"{found.busy_us / found.span_us:.1%}" if found.span_us else "-",
                    *(f"{time_us:,.0f}" for time_us in idle_us),
                    f"{found.launches.num_launches:,}",
                    f"{found.launches.delay_us_median:,.1f}",
                    f"{found.launches.num_shorter_than_launch:,}",
                    "-" if hidden is None else f"{hidden.total_us:,.0f}",
                    "-" if hidden is None else f"{hidden.hidden_share:.0%}",
                ]
            )
    idle = ["host late us", "queued us", "other us"]
    launches = ["launches", "delay us", "short"]
    header = ["rank", "GPU span us", "busy", *idle, *launches, "comm us", "hidden"]
    return _table(rows, header, num_names=1) if rows else ""


def _summary(summary: TraceSummary, peak_flops_per_s: float | None) -> str:
    parts = [f"{_shown(summary.path, 200)}: {summary.num_events:,} events in {summary.duration_us / 1e3:,.2f} ms"]
    if summary.phases:
        rows = [[_shown(phase.name), f"{phase.count:,}", f"{phase.total_us:,.0f}"] for phase in summary.phases]
        parts.append(_table(rows, ["phase", "steps", "us"], num_names=1))
    if summary.operations:
        operations = [
            [_shown(row.phase), _shown(row.name), f"{row.count:,}", f"{row.num_operators:,}", f"{row.total_us:,.0f}"]
            for row in summary.operations
        ]
        parts.append(_table(operations, ["phase", "operation", "count", "operators", "us"]))
    parts += [_modules(summary), _module_kernels(summary), _products(summary, peak_flops_per_s)]
    operators = [
        [_shown(row.phase), _shown(row.name), f"{row.count:,}", f"{row.self_us:,.0f}", f"{row.total_us:,.0f}"]
        for row in summary.operators
    ]
    parts.append(_limited(operators, ["phase", "operator", "count", "self us", "us"]))
    return "\n\n".join(part for part in parts if part)


def critical_paths_text(found: Sequence[CriticalPath]) -> str:
    """Return the critical path of each file."""
    return "\n\n".join(map(critical_path_text, found))


def critical_path_text(found: CriticalPath) -> str:
    """Return what the duration is made of: by kind, then by name."""
    total_us = found.total_us or 1.0
    kinds = sorted(LinkKind, key=found.time_us, reverse=True)
    by_kind = [
        [kind.value, f"{found.time_us(kind):,.0f}", f"{found.time_us(kind) / total_us:.1%}"]
        for kind in kinds
        if found.time_us(kind)
    ]
    by_name = [
        [
            link.kind.value,
            _shown(link.name),
            f"{link.count:,}",
            f"{link.total_us:,.0f}",
            f"{link.total_us / total_us:.1%}",
        ]
        for link in found.links
    ]
    parts = [
        f"{_shown(found.path, 200)}: the critical path of {found.total_us / 1e3:,.2f} ms",
        _table(by_kind, ["kind", "us", "share"], num_names=1),
        _limited(by_name, ["kind", "name", "count", "us", "share"]),
    ]
    return "\n\n".join(part for part in parts if part)


def diff_text(diff: TraceDiff) -> str:
    """Return what ran more or less often, then what took another time."""
    parts = [
        f"the phase {_shown(name)} has {before:,} step{'s' * (before != 1)} before and {after:,} after: "
        "counts of it differ for that"
        for name, before, after in diff.steps
        if before != after
    ]
    counted = [
        [
            _shown(row.phase),
            _shown(row.name),
            f"{row.num_operators_before:,}",
            f"{row.num_operators_after:,}",
            f"{row.num_operators_after - row.num_operators_before:+,}",
        ]
        for row in diff.operations
        if row.is_of_count
    ]
    parts.append(_limited(counted, ["phase", "operation", "operators", "after", "change"]))
    modules = [
        [
            _shown(row.name),
            f"{row.num_operators_before:,}",
            f"{row.num_operators_after:,}",
            f"{row.num_operators_after - row.num_operators_before:+,}",
        ]
        for row in diff.modules
        if row.is_of_count
    ]
    parts.append(_limited(modules, ["module", "operators", "after", "change"], num_names=1))
    for is_of_count in (True, False):
        rows = [
            [
                _shown(row.phase),
                _shown(row.name),
                f"{row.count_before:,}",
                f"{row.count_after:,}",
                f"{row.self_us_before:,.0f}",
                f"{row.self_us_after:,.0f}",
                f"{row.self_us_after - row.self_us_before:+,.0f}",
            ]
            for row in diff.changes
            if row.is_of_count == is_of_count
        ]
        parts.append(_limited(rows, ["phase", "operator", "count", "after", "self us", "after", "change"]))
    if not any(row.is_of_count for row in diff.changes):
        parts.insert(0, "every operator runs as often as before; times differ from run to run, and are no finding")
    return "\n\n".join(part for part in parts if part)


def _limited(rows: Sequence[Sequence[str]], header: Sequence[str], *, num_names: int = 2) -> str:
    left = len(rows) - MAX_ROWS
    more = f"\nand {left:,} more" if left > 0 else ""
    return f"{_table(rows[:MAX_ROWS], header, num_names=num_names)}{more}" if rows else ""


def _table(rows: Sequence[Sequence[str]], header: Sequence[str], *, num_names: int = 2) -> str:
    aligned = ["left"] * num_names + ["right"] * (len(header) - num_names)
    return tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=aligned)


def _shown(name: str | None, width: int = _NAME_WIDTH) -> str:
    """Return a name in one line of printable characters; a trace may be hostile."""
    text = "".join(character if character.isprintable() else "�" for character in name or "-")
    return text if len(text) <= width else f"{text[: width - 1]}…"
