"""Attention whose mask, scale or softmax is at another place, against sums that are written out key by key."""

import math

import pytest
import torch

from harness.judge.explain.attention import masks, softmax

from ..toy_attention import KEY, PLACES, VALUE, N, Q, Toy, step_of
from ..toys import assert_outputs

SCALE = 0.4
HEADS = (0, 0, 0, 1, 1, 1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Toy(tmp_path_factory.mktemp("toy") / "r", scale=SCALE)


def computed(place):
    """Return the places that exist in the step of one."""
    request = place[0]
    return [another for another in PLACES if another[0] == request and step_of(another) <= step_of(place)]


def weighted(toy, weight):
    """Return rows whose heads weigh the values by `weight` of the place, the head and what it reads."""

    def row(place):
        heads = []
        for head in range(N):
            values = [
                weight(place, head, another) * toy.tensors[VALUE][another][HEADS[head]] for another in computed(place)
            ]
            heads.append(torch.stack(values).sum(dim=0))
        return torch.cat(heads)

    return toy.contexts(PLACES, row)


def score(toy, place, head, key_place, scale=SCALE):
    return scale * float(toy.tensors[Q][place][head] @ toy.tensors[KEY][key_place][HEADS[head]])


def softmax_of(toy, change):
    """Return weights whose scores `change` makes of the score and of whether the key is masked."""

    def weight(place, head, another):
        shares = {item: math.exp(change(score(toy, place, head, item), item[1] > place[1])) for item in computed(place)}
        return shares[another] / sum(shares.values())

    return weight


def test_masked_scores_that_take_part(toy):
    whole = softmax_of(toy, lambda score, _is_masked: score)
    expected = {
        "the mask is applied after the softmax": weighted(
            toy, lambda place, head, another: whole(place, head, another) * (another[1] <= place[1])
        ),
        "masked scores are set to 0 instead of left out": weighted(
            toy, softmax_of(toy, lambda score, is_masked: 0.0 if is_masked else score)
        ),
    }
    for bias in (1, 10, 100):
        lowered = softmax_of(toy, lambda score, is_masked, bias=bias: score - bias * is_masked)
        expected[f"masked scores are lowered by {bias} instead of left out"] = weighted(toy, lowered)
    assert_outputs(masks.mask_otherwise, toy.failure(), expected)


def test_rows_that_see_all_there_is_say_nothing_of_the_mask(toy):
    last = [place for place in PLACES if place == max(computed(place))]
    assert list(masks.mask_otherwise(toy.failure(places=last))) == []


def test_a_scale_of_the_probabilities(toy):
    expected = toy.contexts(PLACES, lambda place: toy.context(place, scale=1.0) * SCALE)
    cause = "the softmax scale is applied after the softmax"
    assert_outputs(softmax.scaled_after, toy.failure(), {cause: expected})


def test_a_softmax_over_the_heads(toy):
    def weight(place, head, another):
        if another[1] > place[1]:
            return 0.0
        shares = [math.exp(score(toy, place, item, another)) for item in range(N)]
        return shares[head] / sum(shares)

    def of_the_queries(place, head, another):
        if another[1] > place[1]:
            return 0.0
        queries = [item for item in computed(place) if step_of(item) == step_of(place) and another[1] <= item[1]]
        return math.exp(score(toy, place, head, another)) / sum(math.exp(score(toy, q, head, another)) for q in queries)

    heads = "the softmax runs over the heads instead of the keys"
    queries = "the softmax runs over the queries of a step instead of the keys"
    expected = {heads: weighted(toy, weight), queries: weighted(toy, of_the_queries)}
    assert_outputs(softmax.over_the_heads, toy.failure(), expected)
