"""A gate's result as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.results.gate import GateResult, PairedRatio, PhaseTime

SCHEMA_VERSION = 1


def gate_json(result: GateResult) -> dict[str, Any]:
    """Return everything."""
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": result.verdict,
        "subjects": dict(result.subjects),
        "key": result.key,
        "changes": [
            asdict(change) | {"is_regression": change.is_regression, "subject": change.subject}
            for change in result.changes
        ],
        "times": {phase: _time(found) for phase, found in result.times.items()},
    }


def _time(found: PhaseTime) -> dict[str, Any]:
    """Return the ratio that decides, and both by their clocks."""
    both = {"cpu": _ratio(found.cpu), "wall": _ratio(found.wall)}
    return _ratio(found.decisive) | {"clock": found.clock} | both


def _ratio(ratio: PairedRatio) -> dict[str, Any]:
    return asdict(ratio) | {"verdict": ratio.verdict}
