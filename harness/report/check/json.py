"""The check for programs: JSON with keys that are always present, and figures for a JUnit file.

Scripts may rely on the keys. The figures are pairs for pytest's `record_property`, which a dashboard can plot.
"""

import json
from pathlib import Path
from typing import Any

from harness.errors import printable
from harness.report.check.sentences import divergence_place
from harness.report.check.table import merge_taps, number, sum_coverage, sum_seconds, sum_tokens
from harness.report.document import SCHEMA_VERSION, plain
from harness.results.check import CheckResult, RunResult, TapResult
from harness.results.merging import largest
from harness.results.profile import ProfileResult


def check_json_text(result: CheckResult) -> str:
    """Return `check_json(result)` as text that any JSON parser reads."""
    return json.dumps(check_json(result), indent=2, allow_nan=False)


def check_json(result: CheckResult) -> dict[str, Any]:
    """Return a check as plain dicts, lists, strings and finite numbers.

    `taps` is merged over the schedules as `harness.report.check.table` says; each of `runs` has its own.
    """
    taps = merge_taps(result.runs)
    document = {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.outcome,
        "engine": result.engine,
        "model": result.model,
        "dtype": result.dtype,
        "device": result.device,
        "num_requests": result.num_requests,
        "num_rows": sum(run.num_rows for run in result.runs),
        "num_taps": sum(tap.num_rows > 0 for tap in taps),
        "schedules": [run.schedule for run in result.runs],
        "first_divergence": result.first_divergence,
        "taps": taps,
        "tokens": sum_tokens(result.runs),
        "coverage": sum_coverage(result.runs),
        "timings_s": {
            "golden": result.golden_s,
            "engine": sum_seconds([run.engine_s for run in result.runs]),
            "compare": sum_seconds([run.compare_s for run in result.runs]),
        },
        "findings": [plain(finding) | {"schedule": run.schedule} for run in result.runs for finding in run.findings],
        "seen": result.seen,
        "as_served": result.as_served,
        "power": result.power,
        "notes": result.notes,
        "sources": [{"tap": tap} | plain(source) for tap, source in result.sources.items()],
        "runs": [run_json(run) for run in result.runs],
        "schedules_not_run": result.schedules_not_run,
        "next": result.next_place,
    }
    whole: dict[str, Any] = plain(document)
    return whole


def run_json(run: RunResult) -> dict[str, Any]:
    """Return one run as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(run)
    timings = {"engine": document.pop("engine_s"), "compare": document.pop("compare_s")}
    document.pop("power")  # of the whole check
    return {"schedule": run.schedule, "verdict": document.pop("outcome"), **document, "timings_s": timings}


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
