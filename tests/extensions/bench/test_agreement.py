"""Equal tokens: ties pass and are counted, anything else ends the benchmark."""

from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.extensions.bench.agreement import TokenDivergence, find_divergences, judge_divergences
from harness.extensions.bench.peer import BenchWorkload

WORKLOAD = BenchWorkload(name="batch 2", prompts=[[1, 2], [3]], output_lens=[3, 2])
OURS = [[4, 5, 6], [7, 8]]


class FakeModel:
    """Has the same logits after any past, and remembers it."""

    device = "cpu"

    def __init__(self, logits):
        self.logits, self.pasts = torch.tensor(logits), []

    def __call__(self, token_ids, logits_to_keep):
        assert logits_to_keep == 1
        self.pasts.append(token_ids[0].tolist())
        return SimpleNamespace(logits=self.logits[None, None])


def divergences(theirs):
    return find_divergences(WORKLOAD, {"reference": OURS, "other": theirs})


def test_equal_tokens_do_not_part():
    assert divergences(OURS) == []


def test_each_request_parts_once_where_it_differs_first():
    parts = [(item.peer, item.request, item.token, item.ours, item.theirs) for item in divergences([[4, 9, 9], [0, 8]])]
    assert parts == [("other", 0, 1, 5, 9), ("other", 1, 0, 7, 0)]


def test_too_few_tokens_are_refused():
    with pytest.raises(HarnessError, match="another number of tokens") as caught:
        divergences([[4, 5], [7, 8]])
    assert caught.value.code is Code.PEER_TOKENS_DIFFER


def judge(logits, dtype):
    model = FakeModel(logits)
    divergence = TokenDivergence(peer="other", workload="batch 2", request=0, token=1, ours=5, theirs=0)
    return judge_divergences([divergence], WORKLOAD, OURS, model, dtype=dtype), model


def test_a_near_tie_in_bfloat16_is_a_tie_after_our_own_past():
    ties, model = judge([2.95, -3.0, 0.0, 1.0, -2.0, 3.0], "bfloat16")
    assert model.pasts == [[1, 2, 4]]
    assert ties["other"] == [pytest.approx(0.05 / 2.47, rel=0.01)]


@pytest.mark.parametrize(("logits", "dtype"), [
    ([2.95, -3.0, 0.0, 1.0, -2.0, 3.0], "float32"),  # too far apart for float32
    ([1.0, -3.0, 0.0, 1.0, -2.0, 3.0], "bfloat16"),  # theirs is not the likeliest
    ([3.0, -3.0, 0.0, 1.0, -2.0, 1.0], "bfloat16"),  # ours is not
    ([1.0, 3.0, 0.0, 1.0, -2.0, 1.0], "bfloat16"),  # the two tie, far below another token
])  # fmt: skip
def test_anything_else_ends_the_benchmark(logits, dtype):
    with pytest.raises(HarnessError, match="different tokens") as caught:
        judge(logits, dtype)
    assert caught.value.code is Code.PEER_TOKENS_DIFFER
    assert caught.value.where == "batch 2, request 0, token 1"
