"""A check of a server for programs: keys that are always there, in finite numbers."""

from typing import Any

from harness.report.document import SCHEMA_VERSION, plain
from harness.results.endpoint import EndpointResult


def endpoint_json(result: EndpointResult) -> dict[str, Any]:
    """Return a check of a server as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.outcome,
        "endpoint": result.url,
        "server": result.server,
        "served_model": result.served_model,
        "model": result.model,
        "dtype": result.dtype,
        "num_requests": result.num_requests,
        "capabilities": result.capabilities,
        "schedules": [run.schedule for run in result.runs],
        "findings": [plain(finding) | {"schedule": run.schedule} for run in result.runs for finding in run.findings],
        "notes": result.notes,
        "timings_s": {"server": result.server_s, "truth": result.truth_s, "all": result.all_s},
    }
    return {**plain(document), "runs": plain(result.runs)}
