"""How far an operation is from the true one, in the order in which transformers' own model computes them."""

from collections.abc import Mapping, Sequence

import torch

from harness.extensions.faults.fault import Fault
from harness.extensions.faults.subject import ToolSubject
from harness.oracle.model import load_model

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
"""Names of modules of attention."""


def distance_to(fault: Fault, subject: ToolSubject, operations: Mapping[str, str]) -> dict[str, int | None]:
    """Return the distance of each operation from the nearest one where the fault begins; None if it is unknown."""
    hf = load_model(subject.checkpoint, dtype=getattr(torch, subject.dtype), may_be_patched=True)
    order = [op.tap for op in hf.graph]
    truths = [at for at, tap in enumerate(order) if fault.is_at(tap)]
    return {name: _distance(as_tap(operation, order), order, truths) for name, operation in operations.items()}


def _distance(tap: str | None, order: Sequence[str], truths: Sequence[int]) -> int | None:
    if tap is None or not truths:
        return None
    return min(abs(order.index(tap) - at) for at in truths)


def as_tap(path: str, order: Sequence[str]) -> str | None:
    """Return the tap that a module's path stands for: a layer for its output, attention for its context."""
    parent, _, last = path.rpartition(".")
    candidates = [path, f"{path}.output", path.replace(".act_fn", ".act")]
    if last in ATTENTION:
        candidates.append(f"{parent}.attention")
    return next((tap for tap in candidates if tap in order), None)
