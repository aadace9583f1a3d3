"""A search of workloads for programs: keys that are always there, in finite numbers."""

from typing import Any

from harness.report.check.json import plain, run_json
from harness.results.fuzz import FuzzFinding, FuzzResult

SCHEMA_VERSION = 1


def fuzz_json(result: FuzzResult) -> dict[str, Any]:
    """Return a search as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.outcome,
        "engine": result.engine,
        "model": result.model,
        "dtype": result.dtype,
        "device": result.device,
        "seed": result.seed,
        "num_workloads": result.num_workloads,
        "num_rows": result.num_rows,
        "was_interrupted": result.was_interrupted,
        "unreached": result.unreached,
        "coverage": dict(result.coverage),
        "rejected": dict(result.rejected),
        "notes": result.notes,
        "timings_s": {"golden": result.golden_s, "all": result.elapsed_s},
    }
    return {**plain(document), "findings": [_finding(finding) for finding in result.findings]}


def _finding(finding: FuzzFinding) -> dict[str, Any]:
    document: dict[str, Any] = plain(finding)
    document["run"] = None if finding.run is None else run_json(finding.run)
    document["first_divergence"] = None if finding.run is None else plain(finding.run.first_divergence)
    return document
