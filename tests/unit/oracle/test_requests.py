"""Prompts that a model cannot serve are refused, at both sides of each limit."""

from types import SimpleNamespace

import pytest

from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.oracle.requests import Prompt, check_prompt, duplicate_requests, sampled_positions

HF = SimpleNamespace(vocab_size=10, max_positions=6)


@pytest.mark.parametrize(("tokens", "num_new"), [((0, 9), 1), ((1, 2, 3, 4, 5), 1), ((1, 2, 3), 3)])
def test_what_a_model_can_serve(tokens, num_new):
    check_prompt(HF, Prompt(token_ids=tokens, max_new_tokens=num_new), 3)
    endless = SimpleNamespace(vocab_size=10, max_positions=None)
    check_prompt(endless, Prompt(token_ids=tokens * 100, max_new_tokens=num_new), 3)


@pytest.mark.parametrize(
    ("tokens", "num_new", "code", "said"),
    [
        ((), 1, Code.EMPTY_PROMPT, ("request 3",)),
        ((1,), 0, Code.BAD_OPTION, ("request 3", "0")),
        ((1, 10, 11), 1, Code.TOKEN_OUTSIDE_VOCABULARY, ("token id 10", "request 3, position 1", "0 to 9")),
        ((-1,), 1, Code.TOKEN_OUTSIDE_VOCABULARY, ("token id -1", "position 0")),
        ((1, 2, 3, 4, 5, 6), 1, Code.PROMPT_TOO_LONG, ("at most 6 positions", "6 prompt tokens + 1 new = 7")),
        ((1, 2, 3), 4, Code.PROMPT_TOO_LONG, ("3 prompt tokens + 4 new = 7",)),
    ],
)
def test_what_a_model_cannot_serve(tokens, num_new, code, said):
    with pytest.raises(HarnessError) as caught:
        check_prompt(HF, Prompt(token_ids=tokens, max_new_tokens=num_new), 3)
    assert caught.value.code is code
    assert all(part in str(caught.value) for part in said)


def test_positions_that_choose_a_token():
    request = RequestInfo(id=1, token_ids=[5] * 6, prompt_length=3)
    assert list(sampled_positions(request)) == [2, 3, 4, 5]


def test_copies_have_ids_of_their_own():
    requests = [RequestInfo(id=id_, token_ids=[id_], prompt_length=1) for id_ in (4, 9, 2)]
    copies = duplicate_requests(requests)
    assert [copy.id for copy in copies] == [10, 11, 12]
    assert [copy.token_ids for copy in copies] == [request.token_ids for request in requests]
