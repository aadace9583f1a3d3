"""A benchmark as a page of text."""

from tabulate import tabulate

from harness.extensions.bench.peer import OURS
from harness.extensions.bench.results import BenchResult, Measure


def bench_text(result: BenchResult) -> str:
    """Return what a person reads: medians, who is ahead and by how much, and what the figures depend on."""
    return "\n\n".join([_head(result), _measures(result), _bandwidth(result), _agreement(result)])


def _head(result: BenchResult) -> str:
    return "\n".join(
        [
            f"{result.shape}, {result.num_parameters / 1e6:.3g}M parameters, {result.dtype}, {result.repeats} repeats",
            result.machine.hardware,
            result.machine.software,
            *([f"threads: {result.threads}"] if result.threads else []),
            *([f"{OURS}: {result.reference_backend}"] if result.reference_backend else []),
        ]
    )


def _measures(result: BenchResult) -> str:
    timed = (name for measure in reversed(result.measures) for name in measure.samples)
    names = list(dict.fromkeys([result.engine, *timed]))
    rows = [[measure.name, measure.unit, *_cells(measure, names), _advantage(measure)] for measure in result.measures]
    header = ["median", "", *names, "against the better peer (least to most)"]
    return tabulate(rows, header, disable_numparse=True, colalign=["left", "left", *["right"] * len(names), "left"])


def _cells(measure: Measure, names: list[str]) -> list[str]:
    medians = measure.medians
    return [f"{medians[name]:.4g}" if name in medians else "-" for name in names]


def _advantage(measure: Measure) -> str:
    if measure.better_peer is None:
        return "-"
    least, *_, most = sorted([*measure.advantages] * 2)
    middle = sorted(measure.advantages)[len(measure.advantages) // 2]
    return f"{middle:.2f}x {measure.better_peer} ({least:.2f} to {most:.2f})"


def _bandwidth(result: BenchResult) -> str:
    least, most = (value / 1e9 for value in result.copy_spread)
    lines = [
        f"copy bandwidth, read and written: {result.copy_bytes_per_second / 1e9:.1f} GB/s ({least:.1f} to {most:.1f})"
    ]
    for share in result.shares:
        shares = ", ".join(f"{name} {value:.0%}" for name, value in share.shares.items())
        megabytes = share.bytes_per_step / 1e6
        lines.append(f"share of it, decode at batch {share.batch_size} ({megabytes:.0f} MB a step): {shares}")
    if result.resident_bytes:
        sizes = ", ".join(f"{name} {num_bytes / 1e6:.0f} MB" for name, num_bytes in result.resident_bytes.items())
        lines.append(f"resident memory: {sizes}")
    return "\n".join(lines)


def _agreement(result: BenchResult) -> str:
    lines = [
        f"{own.peer}: the tokens of {result.engine} in {own.num_requests - own.num_ties} of {own.num_requests} requests"
        + (f", the others part at ties (up to {own.worst_tie_stds:.2g} standard deviations)" if own.num_ties else "")
        for own in result.agreements
    ]
    return "\n".join([*lines, *(f"{name}: not timed, {reason}" for name, reason in result.absent.items())])
