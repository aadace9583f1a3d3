"""Prompts that are made for a model: they pass its window, choose its experts, and avoid its special tokens."""

import pytest

from harness.formats.auto_prompts import auto_requests

PLAIN = {"vocab_size": 100, "bos_token_id": 5, "eos_token_id": [6, 7]}


def lengths(config):
    return [len(request.token_ids) for request in auto_requests(config)]


def test_three_requests_of_different_lengths_are_the_same_each_time():
    assert lengths(PLAIN) == [24, 37, 53]
    assert auto_requests(PLAIN) == auto_requests(PLAIN)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"sliding_window": 128}, 136),
        ({"text_config": {"sliding_window": 64}}, 72),
        ({"sliding_window": 4096}, 53),  # too long for a check that nobody asked for
        ({"sliding_window": None}, 53),
        ({"rope_parameters": {"original_max_position_embeddings": 256}}, 264),
        ({"num_experts": 128, "num_experts_per_tok": 4}, 131),
        ({"n_routed_experts": 256, "num_experts_per_tok": 1}, 1024),
    ],
)
def test_the_longest_passes_what_the_config_limits(config, longest):
    assert lengths(PLAIN | config) == [24, 37, longest]


def test_special_tokens_are_not_in_a_prompt():
    config = {"vocab_size": 40, "bos_token_id": 5, "image_token_id": 9, "text_config": {"pad_token_id": 11}}
    used = {token for request in auto_requests(config) for token in request.token_ids}
    assert used <= set(range(3, 36)) - {5, 9, 11}


@pytest.mark.parametrize("vocab_size", [2, 4, 10])
def test_a_small_vocabulary_is_enough(vocab_size):
    used = {token for request in auto_requests({"vocab_size": vocab_size}) for token in request.token_ids}
    assert used
    assert max(used) < max(4, vocab_size)
