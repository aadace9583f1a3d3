"""Changes of schedule that change bits, for programs: keys that are always there, in finite numbers."""

from typing import Any

from harness.report.check.json import plain
from harness.results.invariance import InvarianceResult, ScheduleChange

SCHEMA_VERSION = 1


def invariance_json(result: InvarianceResult) -> dict[str, Any]:
    """Return the result as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(result)
    changes = [_change(change) for change in result.changes]
    return {"schema_version": SCHEMA_VERSION, "verdict": str(result.outcome), **document, "changes": changes}


def _change(change: ScheduleChange) -> dict[str, Any]:
    document: dict[str, Any] = plain(change)
    return {**document, "state": str(change.state)}
