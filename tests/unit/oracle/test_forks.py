"""Forks continue otherwise than the request they come from, by the likeliest other token."""

import pytest
import torch

from harness.oracle.make_golden import cached_golden
from harness.oracle.requests import Prompt, forked_prompts

PROMPT = (5, 9, 200, 17, 31, 8)


@pytest.fixture(scope="module")
def golden(load, tmp_path_factory):
    prompts = [Prompt(token_ids=PROMPT, max_new_tokens=num_new) for num_new in (4, 2, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield cached_golden(load("llama-tiny"), prompts)


@torch.no_grad()
def test_a_fork_has_the_first_new_token_and_the_runner_up_of_the_second(load, golden):
    first = golden.requests[0].token_ids[len(PROMPT)]
    logits = load("llama-tiny").model(torch.tensor([[*PROMPT, first]])).logits[0, -1]
    second, runner_up = logits.topk(2).indices.tolist()
    assert golden.requests[0].token_ids[len(PROMPT) + 1] == second
    fork, of_two, _ = forked_prompts(golden)
    assert fork.token_ids == of_two.token_ids == (*PROMPT, first, runner_up)
    assert (fork.max_new_tokens, of_two.max_new_tokens) == (2, 1)


def test_a_request_of_one_token_is_repeated(golden):
    assert forked_prompts(golden)[2] == Prompt(token_ids=PROMPT, max_new_tokens=1)
