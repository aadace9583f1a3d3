"""Requests: what is refused, how many run at once, and the copies, drafts and forks that are made of them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from harness.engines import Workload
from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.formats.schedule import parse_schedule
from harness.oracle import requests
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import HFModel
from harness.oracle.requests import (
    NUM_GIVEN_UP,
    Prompt,
    batch_requests,
    batch_tokens,
    check_prompt,
    draft_requests,
    duplicate_requests,
    forked_prompts,
    padded,
    sampled_positions,
)

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


REQUESTS = [
    RequestInfo(id=0, token_ids=list(range(3, 33)), prompt_length=8),
    RequestInfo(id=4, token_ids=[7] * 20, prompt_length=2),
    RequestInfo(id=2, token_ids=[5, 6, 7], prompt_length=3),
]


def test_a_request_goes_back_over_seven_tokens_after_its_prompt():
    drafts = draft_requests(REQUESTS, parse_schedule("rewound"))
    assert [(draft.id, draft.draft_of, draft.prompt_length) for draft in drafts] == [(5, 0, 8), (6, 4, 2)]
    assert {len(draft.token_ids) - draft.prompt_length for draft in drafts} == {NUM_GIVEN_UP}


def test_a_request_goes_back_over_fewer_tokens_than_it_has():
    for num_tokens, given_up in ((8, []), (9, []), (10, [1]), (15, [6]), (16, [7]), (17, [7])):
        request = RequestInfo(id=0, token_ids=list(range(num_tokens)), prompt_length=8)
        drafts = draft_requests([request], parse_schedule("rewound"))
        assert [len(draft.token_ids) - 8 for draft in drafts] == given_up


@given(st.integers(1, 9), st.integers(1, 12), st.lists(st.integers(0, 4), min_size=1, max_size=25))
def test_each_is_wrong_at_its_first_position_and_a_step_of_its_request_gives_it_up(num_drafts, prompt_length, tokens):
    request = RequestInfo(id=3, token_ids=tokens, prompt_length=min(prompt_length, len(tokens)))
    for name in ("rewound", f"speculative:{num_drafts}"):
        schedule = parse_schedule(name)
        drafts = draft_requests([request], schedule)
        assert drafts == draft_requests([request], schedule)
        for draft in drafts:
            at = draft.prompt_length
            assert draft.token_ids[:at] == tokens[:at]
            assert at >= request.prompt_length
            assert draft.token_ids[at] != tokens[at]
        steps = list(Workload(requests=[request], schedule=schedule, copies=drafts).steps(request))
        computed = [position for step in steps for item, positions in step if item is request for position in positions]
        assert sorted(set(computed)) == list(range(len(tokens)))
        assert len(computed) - len(tokens) == (len(drafts) if name == "rewound" else 0)
        given_up = {
            (item.id, at) for step in steps for item, positions in step if item is not request for at in positions
        }
        assert given_up == {
            (draft.id, at) for draft in drafts for at in range(draft.prompt_length, len(draft.token_ids))
        }


def test_drafts_are_rejected_after_every_number_of_accepted_ones():
    drafts = draft_requests(REQUESTS[:1], parse_schedule("speculative:3"))
    steps = Workload(requests=REQUESTS, schedule=parse_schedule("speculative:3"), copies=drafts).steps(REQUESTS[0])
    accepted = [len(step[0][1]) - 1 for step in steps if len(step) > 1]
    assert sorted(accepted) == [0, 1, 2]


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
