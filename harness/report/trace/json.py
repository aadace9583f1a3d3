"""Traces as JSON-able data, with a version."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.results.trace import CriticalPath, TraceDiff, TraceSummary

SCHEMA_VERSION = 1


def files_json(found: Sequence[TraceSummary] | Sequence[CriticalPath]) -> dict[str, Any]:
    """Return what was found in each file."""
    return {"schema_version": SCHEMA_VERSION, "files": [asdict(each) for each in found]}


def diff_json(diff: TraceDiff) -> dict[str, Any]:
    """Return what changed between two traces."""
    return {
        "schema_version": SCHEMA_VERSION,
        "changes": [asdict(change) for change in diff.changes],
        "operations": [asdict(change) for change in diff.operations],
        "modules": [asdict(change) for change in diff.modules],
        "steps": [{"phase": name, "before": old, "after": new} for name, old, new in diff.steps],
    }
