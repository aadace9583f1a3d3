"""Costs of quantisation as a table, as JSON, and as a page with plots: KL against size, and by part of the model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from harness.errors import printable
from harness.extensions.quant.result import PartCost, QuantResult, QuantRow
from harness.formats.taps import site_of
from harness.report.check.markdown import escaped
from harness.report.page.check_view import power
from harness.report.page.html import page_of
from harness.report.page.plot import Dot, Line, Plot, Scale, Tick, linear_scale, log_scale, polyline

_TEMPLATES = Path(__file__).parent / "template"
_HEADERS = (
    "type", "bytes", "bits/weight", "perplexity", "KL mean", "median", "99 %", "max", "same top", "format",
    "arithmetic", "share of the bytes",
)  # fmt: skip
_LEAST_KL, _NUM_STYLES, _MOST_WEIGHTS = 1e-12, 8, 12
_TITLES = {"layers": "one layer at a time", "kinds": "one kind of weight at a time", "weights": "one weight at a time"}


def quant_text(result: QuantResult, tablefmt: str = "simple") -> str:
    """Return a result as tables, for a terminal or as Markdown (`github`)."""
    shown = escaped if tablefmt == "github" else printable
    head = (
        f"{shown(result.model)}: {result.num_rows} rows of {shown(result.text)}, perplexity of HuggingFace's original "
        f"{result.perplexity:.4f}"
    )
    table = tabulate(
        [[shown(row.name), *_cells(row)] for row in result.types],
        headers=_HEADERS,
        tablefmt=tablefmt,
        disable_numparse=True,
    )
    foot = (
        "KL in nats from HuggingFace's original; format: HuggingFace with the dequantised weights, from the original; "
        "arithmetic: the engine, from HuggingFace with the dequantised weights"
    )
    notes = [f"{shown(', '.join(names))}: {shown(note)}" for note, names in _notes(result).items()]
    if any(row.kl_mean is None for row in result.types):
        notes.append("-: the engine of this type is not installed, so its arithmetic was not measured")
    parts = [
        f"{title}, all else as in the original: mean KL, and its share of the sum\n\n"
        + tabulate(
            [[shown(cell) for cell in line] for line in _lines_of_parts(result, split)],
            headers=["part", *(shown(row.name) for row in result.types)],
            tablefmt=tablefmt,
            disable_numparse=True,
        )
        for split, title in _splits(result).items()
    ]
    return printable("\n\n".join([head, table, foot, *notes, *parts]), keeps_lines=True)


def quant_html(result: QuantResult) -> str:
    """Return the page of a result."""
    rows = [[row.name, *_cells(row)] for row in result.types]
    lead = f"{result.num_rows} rows of {result.text}, perplexity of HuggingFace's original {result.perplexity:.4f}"
    variables: dict[str, object] = {
        "title": printable(result.model),
        "lead": printable(lead),
        "headers": _HEADERS,
        "rows": rows,
    }
    notes = [f"{', '.join(names)}: {note}" for note, names in _notes(result).items()]
    variables |= {"figures": list(_figures(result)), "notes": [printable(note) for note in notes]}
    return page_of(_TEMPLATES, "quant.html.j2", **variables)


def _notes(result: QuantResult) -> dict[str, list[str]]:
    """Return what is said of rows, with their names."""
    notes: dict[str, list[str]] = {}
    for row in result.types:
        if row.note:
            notes.setdefault(row.note, []).append(row.name)
        for cost in row.phases:
            split = f"format {cost.kl_mean_format:.2e}, arithmetic {cost.kl_mean_arithmetic:.2e}"
            said = f"{cost.phase}, {cost.num_rows} rows: KL mean {cost.kl_mean:.2e}, {split}"
            notes.setdefault(said, []).append(row.name)
    return notes


def _splits(result: QuantResult) -> dict[str, str]:
    asked = {part.split for row in result.types for part in row.parts}
    return {split: title for split, title in _TITLES.items() if split in asked}


def _lines_of_parts(result: QuantResult, split: str) -> Iterator[list[str]]:
    """Yield a line for each part, a cell for each type: of single weights the dearest ones; then the sums."""
    costs = [{part.name: part.kl_mean for part in row.parts if part.split == split} for row in result.types]
    sums = [sum(cost.values()) for cost in costs]
    names = list(dict.fromkeys(name for cost in costs for name in cost))
    if split == "weights":
        names = sorted(names, key=lambda name: -max(cost.get(name, 0) for cost in costs))[:_MOST_WEIGHTS]
    for name in names:
        shares = [(cost.get(name, 0.0), total) for cost, total in zip(costs, sums, strict=True)]
        yield [name, *(f"{value:.2e} {_percent(value / total if total else 0)}" for value, total in shares)]
    yield ["sum of all parts", *(f"{total:.2e}" for total in sums)]
    yield ["all of it at once", *(f"{row.kl_mean_format:.2e}" for row in result.types)]


def _figures(result: QuantResult) -> Iterator[tuple[str, Plot, dict[str, str]]]:
    """Yield each plot with its title, and with the styles of its legend."""
    yield "KL against size", _plot_of_sizes(result), {}
    styles = _styles([row.name for row in result.types])
    for split in ("layers", "kinds"):
        if split in _splits(result):
            lines = {row.name: [part for part in row.parts if part.split == split] for row in result.types}
            yield _TITLES[split], _plot_of_parts(lines, styles, "layer" if split == "layers" else "weights"), styles
    for row in result.types:
        by_kind: dict[str, list[PartCost]] = {}
        for part in row.parts:
            if part.split == "weights":
                by_kind.setdefault(site_of(part.name), []).append(part)
        if by_kind:
            styles = _styles(list(by_kind))
            yield f"{row.name}: {_TITLES['weights']}", _plot_of_parts(by_kind, styles, "layer"), styles


def _styles(names: Sequence[str]) -> dict[str, str]:
    return {name: f"part-{at % _NUM_STYLES}" for at, name in enumerate(names)}


def _plot_of_sizes(result: QuantResult) -> Plot:
    """Return a dot for each type, of its mean KL against its size."""
    x = linear_scale([row.size_bytes / 1e6 for row in result.types])
    y = log_scale([_shown_kl(row) for row in result.types])
    dots = [
        Dot(x=x.at(row.size_bytes / 1e6), y=y.at(_shown_kl(row)), style="", title=_title(row), label=row.name)
        for row in result.types
    ]
    ticks = x.ticks(lambda size: f"{size:g}"), y.ticks(power)
    return Plot(x_ticks=ticks[0], y_ticks=ticks[1], x_label="size in MB", y_label="mean KL in nats", dots=tuple(dots))


def _plot_of_parts(lines: dict[str, list[PartCost]], styles: dict[str, str], x_label: str) -> Plot:
    """Return a line for each type or kind over its parts, in the model's order."""
    places = list(dict.fromkeys(_place(part) for parts in lines.values() for part in parts))
    layers = sorted(place for place in places if isinstance(place, int))
    order = [*layers, *(place for place in places if isinstance(place, str))]
    x = Scale(-0.5, max(len(order), 1) - 0.5)
    y = log_scale([part.kl_mean for parts in lines.values() for part in parts])
    drawn, dots = [], []
    for name, parts in lines.items():
        points = [(x.at(order.index(_place(part))), y.at(max(part.kl_mean, _LEAST_KL))) for part in parts]
        if layers:  # between kinds, which have no order, there is nothing
            drawn.append(Line(path=polyline(sorted(points)), style=styles[name], title=name))
        dots += [
            Dot(x=at, y=height, style=styles[name], title=_title_of_part(name, part))
            for (at, height), part in zip(points, parts, strict=True)
        ]
    step = max(1, len(layers) // 10)
    shown = [(at, place) for at, place in enumerate(order) if isinstance(place, str) or at % step == 0]
    ticks = tuple(Tick(x.at(at), str(place).rpartition(".")[2]) for at, place in shown)
    return Plot(
        x_ticks=ticks,
        y_ticks=y.ticks(power),
        x_label=x_label,
        y_label="mean KL in nats",
        lines=tuple(drawn),
        dots=tuple(dots),
    )


def _place(part: PartCost) -> int | str:
    return part.name if part.layer is None else part.layer


def _title_of_part(name: str, part: PartCost) -> str:
    cost = f"KL {part.kl_mean:.2e} · {part.num_weights:,} weights, changed by {part.relative_error:.2%} of their norm"
    return printable(f"{name} · {part.name} · {cost}")


def _cells(row: QuantRow) -> list[str]:
    kl = [row.kl_mean, row.kl_median, row.kl_p99, row.kl_max]
    split = [row.kl_mean_format, row.kl_mean_arithmetic]
    return [
        f"{row.size_bytes:,}",
        f"{row.bits_per_weight:.2f}",
        _cell(row.perplexity, "{:.4f}"),
        *(_cell(value, "{:.2e}") for value in kl),
        _cell(row.same_top, "{:.2%}").replace("%", " %"),
        *(_cell(value, "{:.2e}") for value in split),
        ", ".join(f"{name} {_percent(share)}" for name, share in row.tensor_types.items()),
    ]


def _percent(share: float) -> str:
    return "< 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _shown_kl(row: QuantRow) -> float:
    """Return the KL of a dot: of the engine, or of the format alone where the engine did not run."""
    return max(row.kl_mean_format if row.kl_mean is None else row.kl_mean, _LEAST_KL)


def _title(row: QuantRow) -> str:
    return printable(f"{row.name}: {row.size_bytes:,} bytes, KL {_shown_kl(row):.2e}")
