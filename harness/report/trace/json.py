"""Traces as JSON-able data, with a version."""

from typing import Any

from harness.report.document import SCHEMA_VERSION, plain
from harness.results.trace import TraceDiff


def diff_json(diff: TraceDiff) -> dict[str, Any]:
    """Return what changed between two traces."""
    return {
        "schema_version": SCHEMA_VERSION,
        "changes": plain(diff.changes),
        "operations": plain(diff.operations),
        "modules": plain(diff.modules),
        "steps": [{"phase": name, "before": old, "after": new} for name, old, new in diff.steps],
    }
