"""What a check would cost, for a terminal and for Markdown."""

from harness.errors import Code, printable
from harness.report.fitted_table import fitted_table
from harness.results.check_cost import CheckCost


def cost_text(result: CheckCost, *, tablefmt: str = "simple") -> str:
    """Return a row for each phase, the disk and the memory; nothing in it is a verdict."""
    rows = [[phase.name, f"{phase.seconds:,.1f}", _gb(phase.read_bytes)] for phase in result.phases]
    rows.append(["all but the engine", f"{result.seconds:,.1f}", _gb(result.read_bytes)])
    table = fitted_table(rows, ["phase", "seconds", "GB read"], tablefmt=tablefmt)
    peak = "not known on this system" if result.peak_bytes is None else f"{_gb(result.peak_bytes)} GB"
    found = "in the cache" if result.has_golden else "to be kept"
    requests = "1 request" if result.num_requests == 1 else f"{result.num_requests} requests"
    lines = [
        f"{Code.NOTHING_CHECKED}: nothing was checked: this is what a check would cost",
        f"{result.model} in {result.dtype}: {requests}, {result.num_tokens:,} tokens; measured on the first "
        f"{result.num_measured} of {result.num_layers} layers, the others taken by their parameters",
        "",
        table,
        "",
        f"disk     {_gb(result.golden_bytes)} GB for the golden, {found}; {_gb(result.recording_bytes)} GB for a "
        "recording while a schedule is judged",
        f"memory   {peak} at most beside mapped files and an engine in another process; "
        f"{_gb(result.available_bytes)} GB are free",
    ]
    return printable("\n".join(lines))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f}"
