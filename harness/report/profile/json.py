"""A profile as JSON: what scripts read from standard output, and the whole of it as a file beside the traces."""

from dataclasses import asdict
from typing import Any

from harness.results.profile import PhaseProfile, ProfileResult

SCHEMA_VERSION = 1


def profile_json(result: ProfileResult) -> dict[str, Any]:
    """Return the figures and the tables; memory over time and the stacks are in the file only."""
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": result.engine,
        "model": result.model,
        "dtype": result.dtype,
        "device": result.device,
        "batch_size": result.batch_size,
        "prompt_tokens": result.num_prompt_tokens,
        "max_new_tokens": result.max_new_tokens,
        "lengths": [list(each) for each in result.lengths],
        "ttft_ms": asdict(result.ttft_ms),
        "tpot_ms": asdict(result.tpot_ms) if result.tpot_ms else None,
        "inter_token_ms": asdict(result.inter_token_ms) if result.inter_token_ms else None,
        "tokens_per_second": result.tokens_per_second,
        "phases": [_phase(phase) for phase in result.phases],
        "overhead": asdict(result.overhead),
        "ceilings": asdict(result.ceilings),
        "environment": dict(result.environment),
        "report": result.report,
        "notes": list(result.notes),
    }


def profile_document(result: ProfileResult) -> dict[str, Any]:
    """Return everything."""
    document = profile_json(result)
    for shown, phase in zip(document["phases"], result.phases, strict=True):
        shown["memory"] = asdict(phase.memory) if phase.memory else None
        shown["counts"] = [asdict(count) for count in phase.counts]
    return document


def _phase(phase: PhaseProfile) -> dict[str, Any]:
    return {
        "name": phase.name,
        "num_steps": phase.num_steps,
        "wall_ms": phase.wall_ms,
        "attributed_share": phase.attributed_share,
        "flops_measured": phase.flops_measured,
        "flops_formula": phase.flops_formula,
        "kv_bytes_measured": phase.kv_bytes_measured,
        "kv_bytes_formula": phase.kv_bytes_formula,
        "peak_bytes": phase.peak_bytes,
        "mfu": phase.mfu,
        "mbu": phase.mbu,
        "bound_by": phase.bound_by.value,
        "bound_by_within_noise": [bound.value for bound in phase.bound_by_within_noise],
        "wall_ms_range": list(phase.wall_ms_range) if phase.wall_ms_range else None,
        "cpu_ms": phase.cpu_ms,
        "num_involuntary_switches": phase.num_involuntary_switches,
        "trace": phase.traces[-1],
        "snapshot": phase.snapshot,
        "traces": list(phase.traces),
        "trace_wall_ms": phase.trace_wall_ms,
        "bytes_formula": phase.bytes_formula,
        "bytes_allocated": phase.bytes_allocated,
        "num_python_calls": phase.num_python_calls,
        "num_operators": sum(count.count for count in phase.counts),
        **{name: getattr(phase.memory, name, None) for name in ("num_allocations", "num_frees", "num_kept")},
        "steps": [asdict(step) | {"label": step.label} for step in phase.steps],
        "layers": [asdict(row) for row in phase.layers],
        "operations": [asdict(row) for row in phase.operations],
        "operators": [asdict(row) for row in phase.operators],
        "roofline": [asdict(point) for point in phase.roofline],
        "notes": list(phase.notes),
    }
