"""A comparison of a trainer with a rollout engine for programs."""

from typing import Any

from harness.report.check.json import plain
from harness.results.rollout import RolloutResult

SCHEMA_VERSION = 1


def rollout_json(result: RolloutResult) -> dict[str, Any]:
    """Return a comparison as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(result)
    return {"schema_version": SCHEMA_VERSION, "verdict": str(result.outcome), **document}
