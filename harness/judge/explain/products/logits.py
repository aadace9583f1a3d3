"""Logits that a sampler has already changed: masked tokens, filters, penalties.

`R` rows, `V` tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch

from harness.judge.explain.core.fit import fit_by_search
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_MASKED = 1e4
"""Times the largest logit of a row below which one is masked, if it is finite at all."""
_BELOW_ALL = 2.0
"""The same where all masked ones are one number."""
_MOST_SHOWN = 8
_PENALTIES = [1 + step / 20 for step in range(-10, 41)]
"""Repetition penalties among which the best one is looked for."""
_LEAST = 1e-3


def sampled(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The logits are those after a sampler has changed them.

    Causes: the logits of *n* tokens are masked: ids *list*; only the *k* largest logits of each row are kept: a top-k
    filter; only the largest logits of each row are kept, in each as many as it takes: a top-p or min-p filter; the
    logits of tokens that the request has are divided by a repetition penalty of *value*; are less by a presence penalty
    of *value*; by a frequency penalty of *value* for each time.
    """
    if wrong.operation.tap != wrong.graph.logits:
        return
    is_masked = masked(wrong)
    if bool(is_masked.any()):
        cause, num_fitted = filter_of(wrong, is_masked)
        output = torch.where(is_masked, wrong.actual, wrong.expected)
        yield Hypothesis(cause=cause, output=output, num_fitted=num_fitted)
        return
    counts = _counts(wrong)
    is_seen = counts > 0
    if not bool(is_seen.any()):
        return

    def penalised(penalty: float) -> torch.Tensor:
        changed = torch.where(wrong.expected > 0, wrong.expected / penalty, wrong.expected * penalty)
        return torch.where(is_seen, changed, wrong.expected)

    best = fit_by_search(_PENALTIES, lambda penalty: float((penalised(penalty) - wrong.actual).norm()))
    penalty = float(f"{best:.5g}")
    if abs(penalty - 1) > _LEAST:
        cause = f"the logits of tokens that the request has are divided by a repetition penalty of {penalty:g}"
        yield Hypothesis(cause=cause, output=penalised(penalty), num_fitted=1)
    for kind, times, unit in (("presence", is_seen.double(), ""), ("frequency", counts, " for each time")):
        size = -wrong.factor_of(times, wrong.expected)
        if abs(size) > _LEAST:
            cause = f"the logits of tokens that the request has are less by a {kind} penalty of {size:.4g}{unit}"
            yield Hypothesis(cause=cause, output=wrong.expected - size * times, num_fitted=1)


def masked(wrong: WrongOperation) -> torch.Tensor:
    """Return [R, V] bool: logits that are negative beyond all that a product gives, or one least number."""
    largest = wrong.expected.abs().amax(dim=1, keepdim=True)
    is_least = wrong.actual == wrong.actual.amin()
    is_one_number = is_least & (is_least.sum() > 1)  # of numbers that a penalty or a scale makes, one is the least
    is_beyond = (wrong.actual < -_MASKED * largest) | ((wrong.actual < -_BELOW_ALL * largest) & is_one_number)
    return is_beyond & ~wrong.actual.isnan()


def filter_of(wrong: WrongOperation, is_masked: torch.Tensor) -> tuple[str, int]:
    """Return what masks these logits [R, V], in words, and how many numbers that takes."""
    num_kept = (~is_masked).sum(dim=1)
    if bool((is_masked == is_masked[:1]).all()) and len(is_masked) > 1:
        return _of_tokens(is_masked[0].nonzero()[:, 0].tolist()), 0
    least_kept = wrong.expected.masked_fill(is_masked, torch.inf).amin(dim=1)
    are_largest = least_kept >= wrong.expected.masked_fill(~is_masked, -torch.inf).amax(dim=1)
    if bool(are_largest.all()) and bool((num_kept == num_kept[0]).all()):
        return f"only the {int(num_kept[0])} largest logits of each row are kept: a top-k filter", 0
    if bool(are_largest.all()):
        return "only the largest logits of each row are kept, in each as many as it takes: a top-p or min-p filter", 1
    tokens = is_masked.any(dim=0).nonzero()[:, 0].tolist()
    return f"{_of_tokens(tokens)}, in each row some of them", int(is_masked.sum())


def _of_tokens(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:_MOST_SHOWN])) + (", ..." if len(tokens) > _MOST_SHOWN else "")
    return f"the logits of {len(tokens)} token{'s' * (len(tokens) > 1)} are masked: ids {shown}"


def _counts(wrong: WrongOperation) -> torch.Tensor:
    """Return [R, V] float64: how often each token is in the request up to the row."""
    tokens = {request.id: torch.tensor(request.token_ids) for request in wrong.recording.manifest.requests}
    counts = torch.zeros_like(wrong.expected)
    for row, (request, position) in enumerate(wrong.rows.places()):
        counts[row] = torch.bincount(tokens[request][: position + 1], minlength=counts.shape[1])[: counts.shape[1]]
    return counts
