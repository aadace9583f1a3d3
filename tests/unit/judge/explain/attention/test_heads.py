"""Query heads that read other KV heads, against sums that are written out key by key."""

import pytest
import torch

from harness.judge.explain.attention import reads

from ..toy_attention import PLACES, N, step_of
from ..toys import by_cause

OWN = [0, 0, 0, 1, 1, 1]
WRONG, VALUES, KEYS = (
    "query heads read the wrong KV heads",
    "query heads read the values of the wrong KV heads, and the right keys",
    "query heads read the keys of the wrong KV heads, and the right values",
)


@pytest.mark.parametrize("wrong_heads", [[1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1]])
@pytest.mark.parametrize(("cause", "is_key", "is_value"), [(WRONG, 1, 1), (VALUES, 0, 1), (KEYS, 1, 0)])
def test_what_is_read_of_other_heads(toy, wrong_heads, cause, is_key, is_value):
    keys, values = wrong_heads if is_key else OWN, wrong_heads if is_value else OWN
    failure = toy.failure(lambda place: toy.context(place, heads=keys, value_heads=values))
    is_tiled = wrong_heads == [0, 1, 0, 1, 0, 1]
    name = "KV heads are tiled instead of repeated" if is_tiled and cause == WRONG else cause
    hypothesis = by_cause(reads.other_kv_heads, failure)[name]
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert hypothesis.detail == f"KV head of each query head: {wrong_heads}"
    assert hypothesis.num_fitted == (0 if is_tiled else 6)


def test_a_context_that_is_laid_out_by_element(toy):
    rows = toy.contexts(PLACES)
    by_element = torch.stack([torch.stack([row[at::4] for at in range(4)]).flatten() for row in rows])
    hypotheses = by_cause(reads.other_layout, toy.failure())
    torch.testing.assert_close(hypotheses["the context is laid out by element, then by head"].output, by_element)


def test_a_context_that_is_reshaped_without_transposing(toy):
    def row(place):
        step = [another for another in PLACES if another[0] == place[0] and step_of(another) == step_of(place)]
        of_heads = [toy.context(another)[4 * head : 4 * head + 4] for head in range(N) for another in step]
        at = step.index(place)
        return torch.cat(of_heads[N * at : N * at + N])

    hypotheses = by_cause(reads.other_layout, toy.failure())
    cause = "the context is reshaped without transposing heads and tokens"
    torch.testing.assert_close(hypotheses[cause].output, toy.contexts(PLACES, row))


def test_heads_that_read_their_own(toy):
    assert by_cause(reads.other_kv_heads, toy.failure()) == {}


def test_one_kv_head_has_no_other(toy, monkeypatch):
    failure = toy.failure(lambda place: toy.context(place, heads=[1, 0, 0, 1, 1, 1]))
    monkeypatch.setattr(reads, "_MOST", 1)
    assert by_cause(reads.other_kv_heads, failure) == {}
    monkeypatch.setattr(reads, "_MOST", 2)
    assert by_cause(reads.other_kv_heads, failure)


def test_the_nearest_head_over_all_rows_counts(toy):
    """One row that is far off in another way does not decide."""
    another = [1, 0, 0, 1, 1, 1]
    actual = toy.contexts(PLACES, lambda place: toy.context(place, heads=another))
    actual[3] += 0.5
    hypothesis = by_cause(reads.other_kv_heads, toy.failure(actual))[WRONG]
    assert hypothesis.detail.endswith(str(another))
