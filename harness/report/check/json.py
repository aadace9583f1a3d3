"""The check for programs: the keys that scripts and other tools may rely on, all always present."""

import json
from typing import Any

from harness.report.check.merge import merge_taps, sum_coverage, sum_seconds, sum_tokens
from harness.report.document import SCHEMA_VERSION, plain
from harness.results.check import CheckResult, RunResult


def check_json_text(result: CheckResult) -> str:
    """Return `check_json(result)` as text that any JSON parser reads."""
    return json.dumps(check_json(result), indent=2, allow_nan=False)


def check_json(result: CheckResult) -> dict[str, Any]:
    """Return a check as plain dicts, lists, strings and finite numbers.

    `taps` is merged over the schedules as `harness.report.check.merge` says; each of `runs` has its own.
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
    return {"schedule": run.schedule, "verdict": document.pop("outcome"), **document, "timings_s": timings}
