"""Calling somebody's forward: by the names of its arguments, and what it may return."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.engines.module.forward import Forward
from harness.errors import Code, HarnessError

CPU = torch.device("cpu")
VOCABULARY = 7


def logits_of(ids):
    """Logits that say which token they are of."""
    return nn.functional.one_hot(ids, VOCABULARY).float()


def module(function):
    """A module with that forward; its arguments are seen as they are."""
    return type("Own", (nn.Module,), {"forward": function})()


def test_token_ids_go_to_the_argument_of_that_name_or_to_the_first():
    def by_name(self, mask=None, input_ids=None):
        assert mask is None
        return logits_of(input_ids)

    def by_place(self, tokens, /):
        return logits_of(tokens)

    for function in (by_name, by_place, lambda self, idx: logits_of(idx), lambda self, *args: logits_of(*args)):
        answer = Forward(module(function), CPU)([3, 5], 0)
        assert answer.logits.argmax(dim=-1).tolist() == [3, 5]
        assert answer.cache is None


def test_positions_are_given_where_they_are_asked_for():
    seen = {}

    def forward(self, input_ids, position_ids, start_pos, input_pos=None, use_cache=False, attention_mask=None):
        seen.update(position_ids=position_ids.tolist(), start_pos=start_pos, input_pos=input_pos.tolist())
        seen.update(use_cache=use_cache, attention_mask=attention_mask)
        return logits_of(input_ids)

    Forward(module(forward), CPU)([3, 5], 4)
    assert seen == {
        "position_ids": [[4, 5]],
        "start_pos": 4,
        "input_pos": [4, 5],
        "use_cache": True,
        "attention_mask": None,
    }


def test_a_mask_is_given_only_where_there_must_be_one():
    def forward(self, input_ids, attention_mask):
        assert attention_mask.tolist() == [[1, 1, 1]]
        return logits_of(input_ids)

    Forward(module(forward), CPU)([3], 2)


@pytest.mark.parametrize(
    "returned",
    [
        lambda logits, cache: (logits, cache),
        lambda logits, cache: SimpleNamespace(logits=logits, kv_cache=cache),
        lambda logits, cache: {"logits": logits, "kv_cache": cache},
    ],
)
def test_a_cache_is_what_the_call_before_returned(returned):
    forward = Forward(
        module(lambda self, ids, kv_cache=None: returned(logits_of(ids), (kv_cache or 0) + ids.shape[1])), CPU
    )
    assert forward.takes_cache
    first = forward([3, 5], 0)
    assert first.cache == 2
    assert forward([1], 2, first.cache).cache == 3


def test_a_forward_that_takes_a_cache_need_not_return_one():
    forward = Forward(module(lambda self, ids, cache=None: logits_of(ids)), CPU)
    assert forward([3], 0).cache is None


@pytest.mark.parametrize("shape", [(2, VOCABULARY), (1, 2, VOCABULARY), (1, VOCABULARY), (VOCABULARY,)])
def test_logits_may_be_of_all_tokens_or_of_the_last(shape):
    answer = Forward(module(lambda self, ids: torch.zeros(shape)), CPU)([3, 5], 0)
    assert answer.logits.shape[-1] == VOCABULARY
    assert len(answer.logits) in (1, 2)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "NoneType"),
        ((), "tuple of nothing"),
        (SimpleNamespace(last_hidden_state=1), "SimpleNamespace"),
        ({"hidden": 1}, "dict of hidden"),
        (torch.zeros(1, 2, dtype=torch.int64), "torch.int64 [1, 2]"),
        (torch.zeros(3, 2, VOCABULARY), "[3, 2, 7]"),
    ],
)
def test_a_forward_that_returns_something_else_is_refused(returned, words):
    with pytest.raises(HarnessError) as caught:
        Forward(module(lambda self, ids: returned), CPU)([3, 5], 0)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert words in str(caught.value)


def test_logits_of_another_width_are_refused():
    forward = Forward(module(lambda self, ids: logits_of(ids)), CPU)
    forward.check_vocabulary(forward([1], 0), VOCABULARY)
    with pytest.raises(HarnessError, match="8 logits a token"):
        forward.check_vocabulary(forward([1], 0), VOCABULARY + 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda self, input_ids, metadata: None, "'metadata'"),
        (lambda self, *, tokens: None, "takes no token ids"),
        (lambda self: None, "takes no token ids"),
    ],
)
def test_a_forward_that_cannot_be_called_is_refused_before_it_is(function, words):
    with pytest.raises(HarnessError) as caught:
        Forward(module(function), CPU)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert words in str(caught.value)
