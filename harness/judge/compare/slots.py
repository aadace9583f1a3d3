"""Cache slots of a recording, held against each other: two rows of one step cannot be in the same one."""

import torch

from harness.errors import Code
from harness.formats.recording import Recording, Step
from harness.judge.compare.align import is_readback
from harness.judge.compare.prefixes import Prefixes
from harness.results.check import Finding


def slot_conflicts(recording: Recording) -> list[Finding]:
    """Return a finding for the first step in which requests with different tokens write the same slot.

    It is a bug of the engine's block tables; or steps that ran one after the other, the second in the slots that the
    first had given back, were recorded as one.
    """
    prefixes = Prefixes(recording.manifest.requests)
    for step in recording.steps:
        if step.slot_mapping is not None and not is_readback(step):
            pair = _first_conflict(step, step.slot_mapping, prefixes)
            if pair is not None:
                return [_finding(step, step.slot_mapping, *pair)]
    return []


def _first_conflict(step: Step, slots: torch.Tensor, prefixes: Prefixes) -> tuple[int, int] | None:
    """Return two rows of different requests and different tokens that have one slot."""
    written = (slots >= 0).nonzero()[:, 0]
    order = written[torch.argsort(slots[written], stable=True)]
    first, second = order[:-1], order[1:]
    is_shared = (slots[first] == slots[second]) & (step.request[first] != step.request[second])
    for one, other in zip(first[is_shared].tolist(), second[is_shared].tolist(), strict=True):
        tokens = [prefixes.at(int(step.request[row]), int(step.position[row])) for row in (one, other)]
        if tokens[0] != tokens[1]:
            return one, other
    return None


def _finding(step: Step, slots: torch.Tensor, one: int, other: int) -> Finding:
    rows = [f"request {int(step.request[row])}, position {int(step.position[row])}" for row in (one, other)]
    message = f"step {step.index} writes slot {int(slots[one])} twice: {rows[0]}, and {rows[1]}"
    request, position = int(step.request[other]), int(step.position[other])
    return Finding(code=Code.SLOT_WRITTEN_TWICE, message=message, request=request, position=position)
