"""How far an operation is from the true one, in the order in which transformers' own model computes them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import torch

from harness.extensions.faults.fault import EngineKind, Fault
from harness.extensions.faults.subject import DUMP_FILE, ToolSubject
from harness.formats.taps import Operation
from harness.oracle.model import load_model

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
"""Names of modules of attention."""


def distance_to(fault: Fault, subject: ToolSubject, operations: Mapping[str, str]) -> dict[str, int | None]:
    """Return the distance of each operation from the nearest one where the fault begins; None if it is unknown.

    A folder of tensors shows some operations only. There a fault begins at the first of them that it reaches.
    """
    hf = load_model(subject.checkpoint, dtype=getattr(torch, subject.dtype), may_be_patched=True)
    order = [op.tap for op in hf.graph]
    truths = [at for at, tap in enumerate(order) if fault.is_at(tap)]
    if subject.kind is EngineKind.DUMP and truths:
        held = {path: value.numel() for path, value in torch.load(subject.engine / DUMP_FILE).items()}
        num_rows = len(subject.prompts[0])  # of a module that ran twice, the folder has the last output
        shown = {op.tap for op in hf.graph if held.get(op.tap) == num_rows * prod(op.shape)}
        first = first_shown(hf.graph, order[truths[0]], shown)
        truths = [] if first is None else [order.index(first)]
    return {name: _distance(as_tap(operation, order), order, truths) for name, operation in operations.items()}


def first_shown(graph: Iterable[Operation], tap: str, shown: Collection[str]) -> str | None:
    """Return the first operation that shows what a tap holds: itself, or what is computed from it."""
    reached = {tap}
    for op in graph:
        if op.tap in reached or not reached.isdisjoint(op.inputs):
            if op.tap in shown:
                return op.tap
            reached.add(op.tap)
    return None


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
