"""Drafts that an engine's own choices accept, beside those that HF's logits accept.

A draft is accepted where the row before it chooses the same token, and all drafts before it are. A forced run accepts
what its workload says; the choices at its rows show what the engine would have accepted.
"""

from collections.abc import Iterator, Mapping

import torch

from harness.formats.recording import Recording, RequestInfo, Step
from harness.judge.compare.align import Locator, all_rows, is_readback
from harness.results.check import VerifiedStep


def compare_acceptance(actual: Recording, expected: Locator, logits: str, threshold: float) -> tuple[VerifiedStep, ...]:
    """Return every step that verifies drafts of a request, in the order of the run.

    Args:
        actual: the engine's recording.
        expected: of the golden.
        logits: tap that tokens are chosen from.
        threshold: distance of two logits of the truth that rounding may turn round.
    """
    requests = {request.id: request for request in actual.manifest.requests}
    return tuple(
        _verified(step, rows, requests, expected, logits, threshold)
        for step in actual.steps
        if not is_readback(step) and step.sampled is not None
        for rows in _verifications(step, requests)
    )


def _verifications(step: Step, requests: Mapping[int, RequestInfo]) -> Iterator[torch.Tensor]:
    """Yield, request by request, the rows of the latest token and its drafts: all choose, and follow the prompt."""
    assert step.sampled is not None
    own = [requests[number].draft_of for number in step.request.tolist()]
    request = torch.tensor([at if of is None else of for at, of in zip(step.request.tolist(), own, strict=True)])
    for number in request.unique().tolist():
        rows = (request == number).nonzero()[:, 0]
        follows = int(step.position[rows[0]]) >= requests[number].prompt_length
        if len(rows) > 1 and follows and int(step.request[rows[0]]) == number and bool((step.sampled[rows] >= 0).all()):
            yield rows


def _verified(
    step: Step,
    rows: torch.Tensor,
    requests: Mapping[int, RequestInfo],
    expected: Locator,
    logits: str,
    threshold: float,
) -> VerifiedStep:
    assert step.sampled is not None
    places = list(zip(step.request[rows].tolist(), step.position[rows].tolist(), strict=True))
    drafts = torch.tensor([requests[request].token_ids[position] for request, position in places[1:]])
    surely, possibly = _by_truth(step, rows[:-1], drafts, expected, logits, threshold)
    return VerifiedStep(
        step=step.index,
        request=places[0][0],
        position=places[0][1],
        num_drafts=len(drafts),
        num_accepted=_leading(step.sampled[rows[:-1]] == drafts),
        truth_least=_leading(surely),
        truth_most=_leading(possibly),
    )


def _by_truth(
    step: Step, rows: torch.Tensor, drafts: torch.Tensor, expected: Locator, logits: str, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [drafts] bool twice: the truth accepts it whatever rounding does, and it may; as far as rows are known."""
    found = expected.find(logits, all_rows(step).select(rows))
    found = found[: _leading(found[:, 0] >= 0)]
    if not len(found):
        return (torch.zeros(0, dtype=torch.bool),) * 2
    values, drafts = expected.gather(logits, found).to(torch.float64), drafts[: len(found)]
    best = values.topk(2, dim=1).values
    chosen = values.gather(1, drafts[:, None])[:, 0]
    return (chosen == best[:, 0]) & (best[:, 0] - best[:, 1] > threshold), best[:, 0] - chosen <= threshold


def _leading(flags: torch.Tensor) -> int:
    """Count the flags before the first that is false."""
    return int(flags.int().cumprod(dim=0).sum())
