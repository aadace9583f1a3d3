"""How fused values are cut, and what is said where they do not fit."""

from types import SimpleNamespace

import pytest
import torch

from harness.engines.torch_modules import Attribute, Fields, PackedHeads, Split
from harness.engines.torch_modules.table import parts_of, taps_of
from harness.errors import Code, HarnessError

X = torch.arange(24.0).view(2, 12)


def cut(value, shown):
    return dict(parts_of(value, shown, "the.module"))


def test_a_whole_value_is_the_first_of_a_tuple():
    for shown in (X, (X, None), [X, X + 1]):
        assert cut("a", shown)["a"] is X
    assert taps_of("a") == ("a",)


def test_a_fused_value_is_cut_by_sizes():
    parts = cut(Split({"q": 6, "k": 4, "v": 2}), (X, None))
    assert [list(parts), [x.shape[1] for x in parts.values()]] == [["q", "k", "v"], [6, 4, 2]]
    assert torch.equal(torch.cat(list(parts.values()), dim=1), X)


def test_heads_packed_by_kv_head():
    """Two KV heads of size 2, each with one query head."""
    parts = cut(PackedHeads(query="q", key="k", value="v", num_kv_heads=2, head_dim=2), X)
    assert parts["q"][0].tolist() == [0, 1, 6, 7]
    assert parts["k"][0].tolist() == [2, 3, 8, 9]
    assert parts["v"][0].tolist() == [4, 5, 10, 11]


def test_more_query_heads_than_kv_heads():
    parts = cut(PackedHeads(query="q", key="k", value="v", num_kv_heads=1, head_dim=3), X)
    assert [x[1].tolist() for x in parts.values()] == [[12, 13, 14, 15, 16, 17], [18, 19, 20], [21, 22, 23]]


def test_an_attribute_of_an_object_or_a_tensor_that_has_none():
    value = Attribute("next_token_logits", "lm_head")
    for shown in (SimpleNamespace(next_token_logits=X, hidden_states=None), X):
        assert cut(value, shown)["lm_head"] is X
    assert taps_of(value) == ("lm_head",)


def test_fields_of_a_tuple():
    value = Fields("normed", None, Split({"a": 5, "b": 7}))
    assert value.taps == ("normed", "a", "b")
    parts = cut(value, (X, X + 1, (X + 2, None)))
    assert parts["normed"] is X
    assert torch.equal(parts["b"], (X + 2)[:, 5:])


@pytest.mark.parametrize("shown", [X, (X,), (X, None)])
def test_a_module_that_returns_less_shows_its_first_fields(shown):
    assert list(cut(Fields("normed", "residual"), shown)) == ["normed"]


@pytest.mark.parametrize(
    ("value", "shown", "said"),
    [
        (Split({"q": 6, "k": 4}), X, "do not add up"),
        (PackedHeads(query="q", key="k", value="v", num_kv_heads=2, head_dim=4), X, "another width"),
        (PackedHeads(query="q", key="k", value="v", num_kv_heads=2, head_dim=3), X, "another width"),
        ("a", "no tensor", "no tensor"),
        ("a", (), "no tensor"),
        ("a", None, "no tensor"),
    ],
)
def test_what_does_not_fit_names_the_module(value, shown, said):
    with pytest.raises(HarnessError, match=said) as caught:
        cut(value, shown)
    assert caught.value.code is Code.BAD_MODULE_TABLE
    assert "the.module" in str(caught.value)
