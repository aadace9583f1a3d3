"""HF token by token through its own cache: the continuation of `generate`, whatever the family calls its cache."""

import pytest
import torch

from harness.oracle.decode import HFDecoder, greedy_continuation

from .state import bits, surroundings

FAMILIES = ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama4_text", "mamba", "mistral", "qwen3_moe")
PROMPT = [3, 9, 14, 27, 33, 5, 6, 41, 12]


class BoomError(Exception):
    """Raised by the tests."""


def hf_generate(hf, token_ids, num_tokens):
    ids = torch.tensor([token_ids])
    output = hf.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(token_ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_the_continuation_is_that_of_generate(load, token_ids, name, dtype):
    hf = load(name, dtype)
    continuation = greedy_continuation(hf, token_ids, 9)
    assert continuation == hf_generate(hf, token_ids, 9)
    assert len(set(continuation)) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_continuation_of_other_families_is_that_of_generate(tiny, family):
    hf = tiny(family)
    assert greedy_continuation(hf, PROMPT, 6) == hf_generate(hf, PROMPT, 6)


def test_the_continuation_goes_on_behind_an_end_of_text_token(load, token_ids):
    hf = load("llama-tiny")
    first = greedy_continuation(hf, token_ids, 1)[0]
    config = hf.model.generation_config
    before = config.eos_token_id
    try:
        config.eos_token_id = first
        assert len(greedy_continuation(hf, token_ids, 5)) == 5
    finally:
        config.eos_token_id = before


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_one_sequence(tiny, family):
    """The logits after a token do not depend on how the tokens before it came."""
    hf = tiny(family)
    with torch.no_grad():
        expected = hf.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[:, -1]
    with HFDecoder(hf) as decoder:
        for piece in (PROMPT[:4], PROMPT[4:7], PROMPT[7:8]) if family != "mamba" else (PROMPT[:7], PROMPT[7:8]):
            decoder.feed([piece])
        assert decoder.cache
        torch.testing.assert_close(decoder.feed([PROMPT[8:]]), expected, rtol=1e-3, atol=1e-3)


def test_a_model_without_a_cache_computes_all_tokens_again(tiny, monkeypatch):
    hf = tiny("gemma3_text")
    monkeypatch.setattr("harness.oracle.decode.new_cache", lambda hf: None)
    monkeypatch.setattr("harness.oracle.caches._CACHES", ())
    with HFDecoder(hf) as decoder:
        decoder.feed([PROMPT])
        assert not decoder.cache
    assert greedy_continuation(hf, PROMPT, 6) == hf_generate(hf, PROMPT, 6)


def test_requests_are_fed_together(load):
    hf = load("qwen3-tiny")
    with HFDecoder(hf) as decoder:
        decoder.feed([PROMPT[:5], PROMPT[2:7]])
        together = decoder.feed([[7], [8]])
    for at, tokens in enumerate(([*PROMPT[:5], 7], [*PROMPT[2:7], 8])):
        with HFDecoder(hf) as decoder:
            torch.testing.assert_close(together[at : at + 1], decoder.feed([tokens]), rtol=1e-4, atol=1e-4)


def test_nothing_is_left_behind(load, token_ids):
    hf = load("llama-tiny", torch.bfloat16)
    before, weights = surroundings(hf), bits(hf.model)
    greedy_continuation(hf, token_ids, 2)
    assert surroundings(hf) == before

    def fail():
        with HFDecoder(hf) as decoder:
            decoder.feed([token_ids])
            raise BoomError

    with pytest.raises(BoomError):
        fail()
    assert surroundings(hf) == before
    assert bits(hf.model) == weights
