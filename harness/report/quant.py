"""Costs of quantisation as a table, as JSON, and as a plot of KL against size."""

from html import escape

from tabulate import tabulate

from harness.errors import printable
from harness.report.check.markdown import escaped
from harness.report.page.scale import linear_scale, log_scale
from harness.results.quant import QuantResult, QuantRow

_HEADERS = (
    "type", "bytes", "bits/weight", "perplexity", "KL mean", "median", "99 %", "max", "same top", "format",
    "arithmetic", "share of the bytes",
)  # fmt: skip
_WIDTH, _HEIGHT, _MARGIN = 640, 400, 60


def quant_text(result: QuantResult, tablefmt: str = "simple") -> str:
    """Return a result as a table, for a terminal or as Markdown (`github`)."""
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
    notes = [f"{shown(row.name)}: {shown(row.note)}" for row in result.types if row.note]
    if any(row.kl_mean is None for row in result.types):
        notes.append("-: the engine of this type is not installed, so its arithmetic was not measured")
    return printable("\n\n".join([head, table, foot, *notes]))


def quant_svg(result: QuantResult) -> str:
    """Return a plot of the mean KL against the size, one dot a type."""
    x_axis = linear_scale([row.size_bytes / 1e6 for row in result.types])
    y_axis = log_scale([_shown_kl(row) for row in result.types])
    parts = [_frame()]
    x_ticks, y_ticks = x_axis.ticks(lambda value: f"{value:g}"), y_axis.ticks(lambda value: f"{value:.0e}")
    parts += [_text(_x(tick.at), _HEIGHT - _MARGIN + 18, tick.label, "middle") for tick in x_ticks]
    parts += [_text(_MARGIN - 8, _y(tick.at) + 4, tick.label, "end") for tick in y_ticks]
    for row in result.types:
        x, y = _x(x_axis.at(row.size_bytes / 1e6)), _y(y_axis.at(_shown_kl(row)))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(_title(row))}</title></circle>')
        parts.append(_text(x + 8, y - 6, row.name, "start"))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 12, "size in MB", "middle"))
    parts.append(_text(_MARGIN, 30, f"mean KL in nats, {result.model}", "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n{body}\n</svg>\n'
    )


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
    return max(row.kl_mean_format if row.kl_mean is None else row.kl_mean, 1e-12)


def _title(row: QuantRow) -> str:
    return f"{row.name}: {row.size_bytes:,} bytes, KL {_shown_kl(row):.2e}"


def _x(percent: float) -> float:
    return _MARGIN + percent / 100 * (_WIDTH - 2 * _MARGIN)


def _y(percent: float) -> float:
    return _HEIGHT - _MARGIN - percent / 100 * (_HEIGHT - 2 * _MARGIN)


def _frame() -> str:
    size = f'width="{_WIDTH - 2 * _MARGIN}" height="{_HEIGHT - 2 * _MARGIN}"'
    return f'<rect x="{_MARGIN}" y="{_MARGIN}" {size} fill="none" stroke="#999"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
