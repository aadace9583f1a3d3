"""What poison an engine let in, for programs: keys that are always there, in finite numbers."""

from typing import Any

from harness.report.check.json import plain
from harness.results.poison import Leak, PoisonResult

SCHEMA_VERSION = 1


def poison_json(result: PoisonResult) -> dict[str, Any]:
    """Return the result as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(result)
    leaks = [_leak(leak) for leak in result.leaks]
    return {"schema_version": SCHEMA_VERSION, "verdict": str(result.outcome), **document, "leaks": leaks}


def _leak(leak: Leak) -> dict[str, Any]:
    document: dict[str, Any] = plain(leak)
    return {"code": str(leak.code), **document, "has_weight": leak.has_weight}
