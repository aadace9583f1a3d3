"""A profile as JSON: what scripts read from standard output, and the whole of it as a file beside the traces."""

from typing import Any

from harness.report.document import document, plain
from harness.results.profile import PhaseProfile, ProfileResult

_IN_THE_FILE_ONLY = ("memory", "counts")


def profile_json(result: ProfileResult) -> dict[str, Any]:
    """Return the figures and the tables; memory over time and the stacks are in the file only."""
    whole = profile_document(result)
    for phase in whole["phases"]:
        for name in _IN_THE_FILE_ONLY:
            del phase[name]
    return whole


def profile_document(result: ProfileResult) -> dict[str, Any]:
    """Return everything."""
    whole = document(result)
    whole["prompt_tokens"] = whole.pop("num_prompt_tokens")
    phases = [_phase(phase) for phase in result.phases]
    return whole | {"environment": dict(result.environment), "phases": phases}


def _phase(phase: PhaseProfile) -> dict[str, Any]:
    return {
        **plain(phase),
        "num_steps": phase.num_steps,
        "trace": phase.traces[-1],
        "num_operators": sum(count.count for count in phase.counts),
        **{name: getattr(phase.memory, name, None) for name in ("num_allocations", "num_frees", "num_kept")},
        "steps": [plain(step) | {"label": step.label} for step in phase.steps],
    }
