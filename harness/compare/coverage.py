"""Coverage fails closed: what was to be recorded and is not, and what the workload never reached."""

from collections.abc import Iterable, Mapping

import torch

from harness.compare.align import Locator, is_readback
from harness.errors import Code
from harness.recording import Recording, Step
from harness.results import Coverage, Finding
from harness.taps import FINAL_NORM, LOGITS

SAMPLED_ONLY = (FINAL_NORM, LOGITS)
"""Taps that an engine may compute for the rows it samples from, and for no others."""


def wanted_rows(tap: str, locator: Locator) -> torch.Tensor:
    """Return [requests, positions] bool: the rows at which `tap` must be recorded."""
    requests = sorted(locator.recording.manifest.requests, key=lambda request: request.id)
    wanted = torch.zeros_like(locator.recorded(tap))
    for row, request in enumerate(requests):
        begin = request.prompt_length - 1 if tap in SAMPLED_ONLY else 0
        wanted[row, begin : len(request.token_ids)] = True
    return wanted


def check_coverage(
    locator: Locator, taps: Iterable[str], *, not_offered: Iterable[str] = (), require: Iterable[str] = ()
) -> tuple[Coverage, list[Finding]]:
    """Count what is there of what must be there.

    Args:
        locator: of the engine's recording.
        taps: names of the taps that must be there.
        not_offered: sites the engine declares it cannot record; reported only.
        require: triggers the workload must have reached.
    """
    findings = list[Finding]()
    expected = recorded = 0
    missing_taps = []
    recorded_taps = set(locator.taps())
    for tap in taps:
        wanted = wanted_rows(tap, locator)
        there = locator.recorded(tap) & wanted
        expected, recorded = expected + int(wanted.sum()), recorded + int(there.sum())
        if tap not in recorded_taps:
            missing_taps.append(tap)
        elif bool((wanted & ~there).any()):
            findings.append(_rows_missing(tap, wanted & ~there, locator))
    if missing_taps:
        shown = ", ".join(missing_taps[:4]) + (f" and {len(missing_taps) - 4} more" if len(missing_taps) > 4 else "")
        findings.append(Finding(code=Code.TAP_MISSING, message=f"not recorded: {shown}", tap=missing_taps[0]))
    reached = triggers(locator.recording)
    findings += [_not_reached(name) for name in require if name not in reached]
    coverage = Coverage(
        expected=expected,
        recorded=recorded,
        missing=expected - recorded,
        missing_taps=tuple(missing_taps),
        not_offered=tuple(not_offered),
        triggers=reached,
    )
    return coverage, findings


def _rows_missing(tap: str, missing: torch.Tensor, locator: Locator) -> Finding:
    row, position = missing.nonzero()[0].tolist()
    request = int(locator.request_ids[row])
    message = f"{int(missing.sum())} rows of {tap} are missing, the first at request {request}, position {position}"
    return Finding(code=Code.ROWS_MISSING, message=message, tap=tap, request=request, position=position)


def check_tokens(recording: Recording, num_compared: int) -> list[Finding]:
    """Return a finding if the engine did not report its own choice at every sampled row."""
    requests = recording.manifest.requests
    expected = sum(len(request.token_ids) - request.prompt_length + 1 for request in requests)
    if num_compared >= expected:
        return []
    message = f"the engine reported its own choice at {num_compared} of {expected} sampled rows"
    return [Finding(code=Code.ROWS_MISSING, message=message)]


_TRIGGERS: Mapping[str, str] = {
    "decode": "no decode step ran: every row was a prompt's (raise --max-new-tokens to at least 2)",
    "chunked_prefill": "no prompt was split into chunks (lower the chunk size or lengthen the prompt)",
    "batch": "no step held rows of more than one request",
    "block_boundary": "no request filled more than one KV block (lengthen the prompt or lower the block size)",
}


def triggers(recording: Recording) -> tuple[str, ...]:
    """Return the names of the conditions that the recorded workload reached."""
    prompts = {request.id: request.prompt_length for request in recording.manifest.requests}
    prefill_steps = dict.fromkeys(prompts, 0)
    reached = set()
    for step in recording.steps:
        if any(len(blocks) > 1 for blocks in (step.block_tables or {}).values()):
            reached.add("block_boundary")
        if is_readback(step):
            continue
        present = step.request.unique().tolist()
        if len(present) > 1:
            reached.add("batch")
        for request in present:
            positions = step.position[step.request == request]
            if _is_decode(step, request, positions, prompts[request]):
                reached.add("decode")
            if bool((positions < prompts[request]).any()):
                prefill_steps[request] += 1
    if any(count > 1 for count in prefill_steps.values()):
        reached.add("chunked_prefill")
    return tuple(name for name in _TRIGGERS if name in reached)


def _is_decode(step: Step, request: int, positions: torch.Tensor, prompt_length: int) -> bool:
    """Whether the step made one token after the prompt; an engine without a cache computes all rows for it again."""
    made = positions if step.sampled is None else step.position[(step.request == request) & (step.sampled >= 0)]
    return len(made) == 1 and int(made[0]) >= prompt_length


def _not_reached(name: str) -> Finding:
    code = Code.NO_DECODE if name == "decode" else Code.TRIGGER_NOT_REACHED
    return Finding(code=code, message=_TRIGGERS.get(name, f"the workload never reached {name!r}"))
