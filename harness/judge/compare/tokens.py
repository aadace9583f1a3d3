"""Greedy choices: the engine's tokens against the truth's, and the drafts that such choices accept.

A choice that differs is a near-tie or an error. A draft is accepted where the row before it chooses the same token, and
all drafts before it are accepted. A forced run accepts what its workload says; the choices at its rows show what the
engine would have accepted.
"""

from collections.abc import Iterator, Mapping

import torch

from harness.errors import Code
from harness.formats.recording import Recording, RequestInfo, Step
from harness.judge.compare.align import Locator, Rows, all_rows, is_readback
from harness.results.check import Finding, TokenResult, VerifiedStep

_BLOCK_ROWS = 256


def compare_tokens(
    actual: Recording,
    expected: Locator,
    logits: str,
    logit_noise: torch.Tensor | None,
    *,
    sound: Locator | None = None,
) -> tuple[TokenResult, list[Finding]]:
    """Compare the tokens that both sides chose, row by row.

    A differing choice is a *tie* if the truth's logit of the chosen token lies below the truth's best by no more than
    twice the largest error that HF itself makes in the engine's dtype on this golden: each of two logits may be off.
    HF's error does not apply to an engine that follows another convention (quantised inputs, for example), or whose
    routers chose other experts at a tie. Where every operation of such an engine is sound, its own logits decide: it
    has to choose the best of them.

    Args:
        actual: the engine's recording.
        expected: of the golden.
        logits: tap that tokens are chosen from.
        logit_noise: HF's own error per row of it.
        sound: of the engine's recording, if it follows a convention or chose other experts, and no operation is wrong.
    """
    threshold = tie_margin(logit_noise)
    pairs = [_choices(step, step.sampled) for step in actual.steps if step.sampled is not None]
    rows = Rows.concat([pair[0] for pair in pairs])
    chosen = torch.cat([torch.empty(0, dtype=torch.int64), *(pair[1] for pair in pairs)])
    places = expected.find(logits, rows)
    present = places[:, 0] >= 0
    rows, chosen, places = rows.select(present), chosen[present], places[present]
    equal, ties, findings = 0, 0, list[Finding]()
    for at in range(0, len(rows), _BLOCK_ROWS):
        block = torch.arange(at, min(at + _BLOCK_ROWS, len(rows)))
        values = expected.gather(logits, places[block]).to(torch.float64)
        margin = _margin(values, chosen[block])
        if sound is not None:
            margin = _tied_by_own(margin, threshold, sound, logits, rows.select(block), chosen[block])
        equal += int((margin == 0).sum())
        ties += int(((margin > 0) & (margin <= threshold)).sum())
        findings += _differences(rows.select(block), chosen[block], values, margin, threshold, logits)
    return TokenResult(compared=len(rows), equal=equal, ties=ties), findings


def tie_margin(logit_noise: torch.Tensor | None) -> float:
    """Return the largest distance of two logits whose order rounding may change: each of them may be off."""
    return 0.0 if logit_noise is None or not len(logit_noise) else 2 * float(logit_noise.max())


def _margin(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[rows]: the best logit minus the chosen one; infinite for a token outside the vocabulary."""
    known = chosen < logits.shape[1]
    margin = torch.full((len(chosen),), torch.inf, dtype=torch.float64)
    margin[known] = logits[known].amax(dim=1) - logits[known, chosen[known]]
    return margin


def _tied_by_own(
    margin: torch.Tensor, threshold: float, sound: Locator, logits: str, rows: Rows, chosen: torch.Tensor
) -> torch.Tensor:
    """Return the margins, at most the threshold where the engine chose the best of its own logits: a tie."""
    places = sound.find(logits, rows)
    far = ((margin > threshold) & (places[:, 0] >= 0)).nonzero()[:, 0]
    if len(far):
        own_logits = sound.gather(logits, places[far]).to(torch.float64)
        margin[far[_margin(own_logits, chosen[far]) == 0]] = threshold
    return margin


def _choices(step: Step, sampled: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """Rows of a step at which the engine chose a token, and the tokens."""
    at = (sampled >= 0).nonzero()[:, 0]
    return all_rows(step).select(at), sampled[at]


def _differences(
    rows: Rows, chosen: torch.Tensor, logits: torch.Tensor, margin: torch.Tensor, threshold: float, tap: str
) -> list[Finding]:
    findings = []
    for at in (~(margin <= threshold)).nonzero()[:, 0].tolist():
        request, position = int(rows.request[at]), int(rows.position[at])
        message = (
            f"request {request} chose token {int(chosen[at])} after position {position}, expected "
            f"{int(logits[at].argmax())}: its logit is {float(margin[at]):.3g} below the best, "
            f"noise allows {threshold:.3g}"
        )
        findings.append(Finding(code=Code.TOKENS_DIFFER, message=message, tap=tap, request=request, position=position))
    return findings


def compare_acceptance(actual: Recording, expected: Locator, logits: str, threshold: float) -> tuple[VerifiedStep, ...]:
    """Return every step that verifies drafts of a request, in the order of the run.

    Args:
        actual: the engine's recording.
        expected: of the golden.
        logits: tap that tokens are chosen from.
        threshold: largest distance of two logits of the truth whose order rounding may change.
    """
    requests = {request.id: request for request in actual.manifest.requests}
    return tuple(
        _verified(step, rows, requests, expected, logits, threshold)
        for step in actual.steps
        if not is_readback(step) and step.sampled is not None
        for rows in _verifications(step, requests)
    )


def _verifications(step: Step, requests: Mapping[int, RequestInfo]) -> Iterator[torch.Tensor]:
    """Yield the rows of each request's latest token and its drafts: all choose a token, and follow the prompt."""
    assert step.sampled is not None
    drafts_of = [requests[number].draft_of for number in step.request.tolist()]
    request = torch.tensor([at if of is None else of for at, of in zip(step.request.tolist(), drafts_of, strict=True)])
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
    """Return two [drafts] bool: the truth certainly accepts the draft, and possibly; up to the first missing row."""
    places = expected.find(logits, all_rows(step).select(rows))
    places = places[: _leading(places[:, 0] >= 0)]
    if not len(places):
        return (torch.zeros(0, dtype=torch.bool),) * 2
    values, drafts = expected.gather(logits, places).to(torch.float64), drafts[: len(places)]
    best = values.topk(2, dim=1).values
    chosen = values.gather(1, drafts[:, None])[:, 0]
    return (chosen == best[:, 0]) & (best[:, 0] - best[:, 1] > threshold), best[:, 0] - chosen <= threshold


def _leading(flags: torch.Tensor) -> int:
    """Count the flags before the first that is false."""
    return int(flags.int().cumprod(dim=0).sum())
