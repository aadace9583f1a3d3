"""The check for a JUnit file: figures a dashboard can plot, as pairs for pytest's `record_property`."""

from pathlib import Path

from harness.report.check.merge import merge_taps, sum_coverage, sum_tokens
from harness.report.check.sentences import divergence_place, number, printable
from harness.results.check import CheckResult, TapResult
from harness.results.merging import largest
from harness.results.profile import ProfileResult


def check_properties(result: CheckResult) -> list[tuple[str, str]]:
    """Return (name, value) pairs; what was not measured is left out."""
    taps = merge_taps(result.runs)
    tokens, coverage = sum_tokens(result.runs), sum_coverage(result.runs)
    codes = sorted({finding.code.value for run in result.runs for finding in run.findings})
    divergence = result.first_divergence
    figures = {
        "verdict": result.outcome,
        "engine": result.engine,
        "model": result.model,
        "dtype": result.dtype,
        "device": result.device,
        "schedules": " ".join(run.schedule for run in result.runs),
        "num_rows": sum(run.num_rows for run in result.runs),
        "num_taps": sum(tap.num_rows > 0 for tap in taps),
        **_worst_by_kind(taps),
        "propagated_ratio_max": _figure(largest(tap.propagated_ratio_max for tap in taps)),
        "first_divergence": divergence and f"{divergence.tap}: {divergence_place(divergence)}",
        "tokens_compared": tokens.compared,
        "tokens_equal": tokens.equal,
        "tokens_ties": tokens.ties,
        "rows_expected": coverage.expected,
        "rows_missing": coverage.missing,
        "findings": " ".join(codes) or None,
    }
    return [(name, printable(str(value))) for name, value in figures.items() if value is not None]


def profile_properties(result: ProfileResult, captures: Path | None) -> list[tuple[str, str]]:
    """Return (name, value) pairs of a profile that is kept in the folder `captures`."""
    figures: dict[str, object] = {
        "captures": captures,
        "ttft_ms": _figure(result.ttft_ms.median),
        "tpot_ms": _figure(result.tpot_ms.median if result.tpot_ms else None),
        "tokens_per_second": _figure(result.tokens_per_second),
    }
    for phase in result.phases:
        figures |= {
            f"wall_ms.{phase.name}": _figure(phase.wall_ms),
            f"peak_bytes.{phase.name}": phase.peak_bytes,
            f"num_operators.{phase.name}": sum(count.count for count in phase.counts),
        }
    return [(name, printable(str(value))) for name, value in figures.items() if value is not None]


def _worst_by_kind(taps: tuple[TapResult, ...]) -> dict[str, str | None]:
    kinds = dict.fromkeys(str(tap.kind) for tap in taps)
    return {
        f"roundings_max.{kind}": _figure(largest(tap.local_roundings_max for tap in taps if tap.kind == kind))
        for kind in kinds
    }


def _figure(value: float | None) -> str | None:
    return None if value is None else number(value).replace(",", "")
