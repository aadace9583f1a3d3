"""Memory snapshots as JSON-able data, with a version."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.results.memory import MemoryDiff, MemorySummary

SCHEMA_VERSION = 1


def memory_json(summaries: Sequence[MemorySummary]) -> dict[str, Any]:
    """Return what is in each file."""
    return {"schema_version": SCHEMA_VERSION, "files": [_summary(each) for each in summaries]}


def memory_diff_json(diff: MemoryDiff) -> dict[str, Any]:
    """Return what changed between two files."""
    changes = {"now": diff.now, "at_peak": diff.at_peak}
    return {
        "schema_version": SCHEMA_VERSION,
        "before": _summary(diff.before),
        "after": _summary(diff.after),
        **{
            when: [asdict(change) | {"added_bytes": change.added_bytes} for change in own]
            for when, own in changes.items()
        },
    }


def _summary(summary: MemorySummary) -> dict[str, Any]:
    devices = [asdict(device) | {"free_bytes": device.free_bytes} for device in summary.devices]
    return {"file": summary.file, "devices": devices}
