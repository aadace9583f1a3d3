"""Logits that a sampler has changed before they are recorded."""

import pytest
import torch

from harness.errors import Code

TAP = "lm_head"
NINF = float("-inf")


def tokens_of(bench):
    """[R, V]: how often each token is in the request up to the row."""
    rows, width = bench.rows(TAP), bench.tap(TAP).shape[1]
    tokens = {request.id: request.token_ids for request in bench.recording.manifest.requests}
    counts = torch.zeros(len(rows.request), width, dtype=torch.float64)
    for row, (request, position) in enumerate(zip(rows.request.tolist(), rows.position.tolist(), strict=True)):
        for token in tokens[request][: position + 1]:
            counts[row, token] += 1
    return counts


def repetition(y, counts):
    return torch.where(counts > 0, torch.where(y > 0, y / 1.3, y * 1.3), y)


def top_p(y, _counts):
    order = y.softmax(-1).sort(descending=True)
    kept = order.values.cumsum(-1) - order.values < 0.9
    return y.masked_fill(~torch.zeros_like(kept).scatter(1, order.indices, kept), NINF)


CHANGES = {
    "the logits of 1 token are masked: ids 7": lambda y, _: y.index_fill(1, torch.tensor([7]), -1e9),
    "the logits of 2 tokens are masked: ids 7, 9": lambda y, _: y.index_fill(1, torch.tensor([7, 9]), NINF),
    "the logits of 1 token are masked: ids 8": lambda y, _: y.index_fill(
        1, torch.tensor([8]), -4 * float(y.abs().max())
    ),
    "only the 10 largest logits of each row are kept: a top-k filter": lambda y, _: y.masked_fill(
        y < y.topk(10).values[:, -1:], NINF
    ),
    "only the largest logits of each row are kept, in each as many as it takes: a top-p or min-p filter": top_p,
    "the logits of tokens that the request has are divided by a repetition penalty of 1.3": repetition,
    "the logits of tokens that the request has are less by a presence penalty of 0.5": lambda y, n: y - 0.5 * (n > 0),
    "the logits of tokens that the request has are less by a presence penalty of 64": lambda y, n: y - 64 * (n > 0),
    "the logits of tokens that the request has are less by a frequency penalty of 0.25 for each time": lambda y, n: (
        y - 0.25 * n
    ),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_what_a_sampler_does_is_named(bench, cause):
    wrong = CHANGES[cause](bench.tap(TAP), tokens_of(bench))
    code = Code.LOCAL_ERROR if bool(wrong.isfinite().all()) else Code.NOT_FINITE
    explanation = bench.explain(TAP, wrong.to(torch.float32).double(), code=code)
    assert (explanation.cause, explanation.is_cause) == (cause, True)
