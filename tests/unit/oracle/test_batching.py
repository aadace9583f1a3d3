"""How many requests and tokens are run at once, by hand."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from harness.formats.recording import RequestInfo
from harness.oracle import requests
from harness.oracle.model import HFModel
from harness.oracle.requests import batch_requests, batch_tokens, padded


def requests_of(*lengths):
    return [RequestInfo(id=at, token_ids=[at + 1] * length, prompt_length=1) for at, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((3, 4, 2), [[3, 4, 2]]),
        ((3, 5, 2), [[3, 5], [2]]),
        ((6, 6, 1), [[6, 6], [1]]),
        ((6, 7, 1), [[6], [7], [1]]),
        ((1, 7, 4, 4, 4, 4), [[1], [7], [4, 4, 4], [4]]),
        ((20, 1, 1), [[20], [1, 1]]),
        ((), []),
    ],
)
def test_requests_stay_in_order_and_within_the_tokens_padding_included(monkeypatch, lengths, expected):
    monkeypatch.setattr(requests, "batch_tokens", lambda _hf: 12)
    groups = batch_requests(None, requests_of(*lengths))
    assert [[len(request.token_ids) for request in group] for group in groups] == expected
    assert [request.id for group in groups for request in group] == list(range(len(lengths)))


def hf(*shapes, **config):
    parameters = [torch.zeros(shape, device="meta") for shape in shapes]
    return SimpleNamespace(model=SimpleNamespace(parameters=lambda: parameters), config=SimpleNamespace(**config))


LARGEST = 256 << 20


@pytest.mark.parametrize(
    ("model", "width"),
    [
        (hf((5000, 4), (3000, 4), (9000,)), 5000),
        (hf((50000, 4), hidden_size=1000, intermediate_size=4000), 4000),
        (hf((50000, 4), hidden_size=1000, ffn_dim=7000, n_inner=None), 7000),
        (hf((50000, 4), n_inner=2000), 2000),
        (hf((3000, 4), hidden_size=1000, intermediate_size=4000), 3000),
        (hf((3, 3, 3)), 1),
        (hf((0, 3)), 1),
    ],
)
def test_tokens_whose_widest_values_fit_into_memory(model, width):
    """Eight values of eight bytes each."""
    assert batch_tokens(model) == max(512, LARGEST // (64 * width))


def test_512_tokens_at_least():
    assert batch_tokens(hf((8192, 1))) == 512
    assert batch_tokens(hf((8190, 1))) == 512
    assert batch_tokens(hf((8000, 1))) == LARGEST // (64 * 8000) == 524


def test_shorter_requests_are_padded_behind_their_end():
    assert padded(requests_of(2, 4, 1)).tolist() == [[1, 1, 0, 0], [2, 2, 2, 2], [3, 0, 0, 0]]


@pytest.mark.parametrize(
    ("rope", "is_alone"),
    [
        ({"rope_type": "longrope"}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, True),
        ({"rope_type": "yarn", "factor": 2.0}, False),
        (None, False),
    ],
)
def test_requests_are_alone_where_a_longer_one_would_change_their_frequencies(rope, is_alone):
    """HF takes LongRoPE's long factors for all of a batch whose longest request needs them."""
    assert (batch_tokens(hf((8, 8), rope_parameters=rope)) == 1) == is_alone


@pytest.mark.parametrize("kinds", [None, ("full_attention", "sliding_attention")])
def test_frequencies_do_not_follow_the_requests_before(kinds):
    """HF keeps the `dynamic` frequencies of a long request until one is shorter than the original context."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16, "vocab_size": 64}
    torch.manual_seed(0)
    if kinds is None:
        config = LlamaConfig(**sizes, hidden_size=16, intermediate_size=8, rope_parameters=rope)
        model = LlamaForCausalLM(config).eval()
    else:
        ropes = {"rope_parameters": {kind: dict(rope) for kind in kinds}, "layer_types": list(kinds), "head_dim": 8}
        config = Gemma3TextConfig(**sizes, hidden_size=16, intermediate_size=8, num_key_value_heads=1, **ropes)
        model = Gemma3ForCausalLM(config).eval()
    one = HFModel(model=model, checkpoint=SimpleNamespace(folder="here"), dtype=torch.float32, device="cpu")
    first = {length: one.run(input_ids=torch.arange(length)[None]).logits for length in (16, 18, 40)}
    for length in (40, 18, 40, 16):
        assert torch.equal(one.run(input_ids=torch.arange(length)[None]).logits, first[length])
