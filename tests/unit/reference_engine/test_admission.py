from __future__ import annotations

import numpy as np
import pytest

from reference_engine.errors import CapacityError, RequestError
from reference_engine.requests.admission import Admission
from reference_engine.requests.sampling import SamplingParams

ADMISSION = Admission(vocab_size=10, max_model_len=32, num_usable_blocks=5, block_size=4)


def test_any_integers_become_a_plain_list() -> None:
    assert ADMISSION.check(np.array([1, 2]), SamplingParams()) == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty, in prompt_token_ids: expected at least 1 token, found 0"),
        ([1, 10], r"outside the vocabulary, in prompt_token_ids\[1\]: expected 0 <= id < 10, found 10"),
        ([-1], r"in prompt_token_ids\[0\]: expected 0 <= id < 10, found -1"),
        ([1.5], "a token id is not an integer"),
        ("a prompt", "a token id is not an integer"),
        (7, "a token id is not an integer"),
        ([1] * 30, r"expected at most 32 tokens, found 30 \+ 16 = 46"),
    ],
)
def test_a_malformed_prompt_is_refused_with_its_values(prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ADMISSION.check(prompt, SamplingParams())


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    params = SamplingParams(max_new_tokens=1)
    assert len(ADMISSION.check([1] * 20, params)) == 20
    with pytest.raises(CapacityError, match="expected at most 5 blocks of 4 tokens, found 21 tokens = 6 blocks"):
        ADMISSION.check([1] * 21, params)


def test_forced_tokens_must_be_tokens() -> None:
    with pytest.raises(RequestError, match=r"forced_token_ids\[1\]"):
        ADMISSION.check([1], SamplingParams(forced_token_ids=[1, 99]))


@pytest.mark.parametrize("max_new_tokens", [0, -3, 1.5, True, "4", None])
def test_an_impossible_length_is_refused(max_new_tokens: object) -> None:
    with pytest.raises(RequestError, match="expected an integer of at least 1, found"):
        SamplingParams(max_new_tokens=max_new_tokens)


def test_more_forced_tokens_than_generated_are_refused() -> None:
    with pytest.raises(RequestError, match="at most max_new_tokens = 2 forced_token_ids, found 3"):
        SamplingParams(max_new_tokens=2, forced_token_ids=[1, 2, 3])


@pytest.mark.parametrize(
    ("ignore_eos", "forced", "stops"), [(None, None, True), (None, [1], False), (True, None, False), (False, [1], True)]
)
def test_forcing_ignores_eos_unless_told(ignore_eos: bool | None, forced: list[int] | None, stops: bool) -> None:
    assert SamplingParams(ignore_eos=ignore_eos, forced_token_ids=forced).stops_at_eos is stops
