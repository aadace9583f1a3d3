"""A check of chats for programs."""

from typing import Any

from harness.report.check.json import plain
from harness.results.tokens import TokensResult

SCHEMA_VERSION = 1


def tokens_json(result: TokensResult) -> dict[str, Any]:
    """Return a check of chats as plain dicts, lists, strings and finite numbers."""
    return {"schema_version": SCHEMA_VERSION, "verdict": result.outcome.value, **plain(result)}
