"""Speculation and going back: what is given up leaves no trace, neither in tokens nor in blocks."""

from unittest.mock import Mock

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.errors import ConfigError, RequestError
from reference_engine.speculation import DraftModel, NgramDrafter

from .conftest import SIZES
from .schedules import finish

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 9, 9, 9, 9], [11, 12, 13]]


class Scripted:
    """Guesses the true continuation with every so many tokens replaced."""

    def __init__(self, continuations, num_tokens, wrong_every):
        self.continuations, self.num_tokens, self.wrong_every = continuations, num_tokens, wrong_every

    def draft(self, sequence):
        true = self.continuations[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        begin = sequence.num_tokens - sequence.num_prompt_tokens
        guesses = true[begin : begin + self.num_tokens]
        return [(token + 1) % 97 if (begin + at) % self.wrong_every == 0 else token for at, token in enumerate(guesses)]


def engine_of(checkpoint, **options):
    config = {"dtype": "float32", "block_size": 4, "debug_checks": True, **options}
    return LLMEngine(checkpoint.folder, EngineConfig(**config))


def continuations(checkpoint, params, **options):
    with engine_of(checkpoint, **options) as engine:
        return [list(output.token_ids) for output in engine.generate(PROMPTS, params)], engine


@pytest.mark.parametrize(
    ("temperature", "wrong_every", "options"),
    [
        (0.0, 1, {"enable_prefix_caching": True}), (1.0, 3, {"enable_prefix_caching": True}), (0.0, 100, {}),
        (0.0, 3, {"num_blocks": 8}), (1.0, 1, {"num_blocks": 8}), (1.0, 100, {"max_num_batched_tokens": 6}),
    ],
)  # fmt: skip
def test_drafts_change_no_token(checkpoint, temperature, wrong_every, options):
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=7, ignore_eos=True)
    expected, _ = continuations(checkpoint, params)
    true = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    with engine_of(checkpoint, **options) as engine:
        engine.drafter = Scripted(true, 4, wrong_every)
        assert [list(output.token_ids) for output in engine.generate(PROMPTS, params)] == expected
        assert engine.speculation.num_drafted > 0
        assert (engine.speculation.num_accepted > 0) == (wrong_every > 1)
        assert engine.pool.num_free == engine.pool.num_usable


def test_a_request_that_is_preempted_with_its_drafts_is_computed_anew_without_them(checkpoint, monkeypatch):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected, _ = continuations(checkpoint, params)
    num_drafts, true = [], {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    with engine_of(checkpoint, num_blocks=8, enable_prefix_caching=True) as engine:
        engine.drafter = Scripted(true, 4, 3)
        release = engine.scheduler._release

        def noted(sequence):
            num_drafts.append(sequence.num_drafts)
            release(sequence)

        monkeypatch.setattr(engine.scheduler, "_release", noted)
        outputs = engine.generate(PROMPTS, params)
    assert max(num_drafts) > 0
    assert [list(output.token_ids) for output in outputs] == expected


def test_prompt_lookup_is_plain_greedy_in_fewer_steps(checkpoint):
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    expected, _ = continuations(checkpoint, params)
    actual, engine = continuations(checkpoint, params, num_speculative_tokens=4)
    assert actual == expected
    assert engine.speculation.num_drafted >= engine.speculation.num_accepted


def test_nothing_is_left_to_verify_after_a_step(checkpoint):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    (expected, *_), _ = continuations(checkpoint, params)
    with engine_of(checkpoint) as engine:
        engine.drafter = Scripted({tuple(PROMPTS[0]): expected}, 4, 100)
        engine.add_request(PROMPTS[0], params)
        engine.step()
        assert [output.token_id for output in engine.step()] == expected[1:6]
        (sequence,) = engine.scheduler.running
        assert (sequence.num_drafts, sequence.num_remaining_tokens) == (0, 1)


def test_an_end_amid_accepted_drafts_is_the_end(checkpoint):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected, _ = continuations(checkpoint, params)
    stop = expected[0][4]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    with engine_of(checkpoint) as engine:
        engine.drafter = Scripted({tuple(PROMPTS[0]): expected[0]}, 6, 100)
        (output,) = engine.generate(PROMPTS[:1], params)
    assert list(output.token_ids) == expected[0][: expected[0].index(stop) + 1]


def test_what_was_rejected_is_never_found_in_the_prefix_cache(checkpoint):
    """The rejected tokens fill blocks; another request that begins with them computes them itself."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    (expected, *_), _ = continuations(checkpoint, params)
    with engine_of(checkpoint, enable_prefix_caching=True) as engine:
        engine.drafter = Scripted({tuple(PROMPTS[0]): expected}, 7, 1)
        engine.add_request(PROMPTS[0], params)
        engine.step()
        engine.step()  # verifies seven drafts, all of them wrong
        cached = [token for prefix in engine.pool.prefix_cache.prefixes.values() for token in prefix.token_ids]
        assert cached == PROMPTS[0][:8]
        (table,) = [sequence.block_table for sequence in engine.scheduler.running]
        assert len(table) == 3  # 11 tokens are computed: the blocks with nothing but rejected ones are free


def test_a_request_that_goes_back_goes_on_as_if_it_had_never_been_there(checkpoint):
    wrong, params = [40, 41, 42, 43, 44, 45, 46], SamplingParams(max_new_tokens=8, ignore_eos=True)
    (expected, *_), _ = continuations(checkpoint, params)
    for options in ({}, {"enable_prefix_caching": True}):
        with engine_of(checkpoint, **options) as engine:
            forced = SamplingParams(max_new_tokens=9, forced_token_ids=wrong, ignore_eos=True)
            request = engine.add_request(PROMPTS[0], forced)
            for _ in range(8):
                engine.step()
            engine.rewind(request, len(PROMPTS[0]), params)
            (sequence,) = engine.scheduler.running
            assert len(sequence.block_table) == 3
            assert list(finish(engine).values()) == [expected]


def test_a_fork_keeps_what_its_original_goes_back_over(checkpoint):
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    (expected, *_), _ = continuations(checkpoint, params)
    with engine_of(checkpoint, enable_prefix_caching=True) as engine:
        request = engine.add_request(PROMPTS[0], params)
        for _ in range(5):
            engine.step()
        fork = engine.fork(request)
        engine.rewind(request, len(PROMPTS[0]))
        tokens = finish(engine)
    assert tokens == {request: expected, fork: expected[5:]}


def test_a_block_that_was_shared_is_not_found_once_its_last_owner_writes_over_it(checkpoint):
    """The fork owns the block when the request goes back into it, and is gone when the request writes."""
    params = SamplingParams(max_new_tokens=10, forced_token_ids=[40, 41, 42, 43, 44, 45, 46], ignore_eos=True)
    with engine_of(checkpoint, enable_prefix_caching=True) as engine:
        request = engine.add_request(PROMPTS[0], params)
        for _ in range(5):
            engine.step()
        fork = engine.fork(request)
        engine.rewind(request, len(PROMPTS[0]), SamplingParams(max_new_tokens=3, ignore_eos=True))
        engine.abort(fork)
        finish(engine)  # debug_checks hold each block that can be found against what it holds


def test_a_step_that_fails_leaves_nothing_to_verify(checkpoint, monkeypatch):
    """A request that is suspended then, as the server does, is computed anew from its own tokens alone."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    (expected, *_), _ = continuations(checkpoint, params)
    with engine_of(checkpoint) as engine:
        engine.drafter = Scripted({tuple(PROMPTS[0]): expected}, 4, 3)
        request = engine.add_request(PROMPTS[0], params)
        tokens = [output.token_id for output in engine.step()]
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "run", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                engine.step()
        (sequence,) = engine.scheduler.running
        assert (sequence.token_ids, sequence.num_drafts) == (PROMPTS[0] + expected[:1], 0)
        engine.suspend(request)
        engine.resume(request)
        tokens += finish(engine)[request]
    assert tokens == expected


def test_drafts_leave_a_token_of_the_budget_to_each_request(checkpoint):
    with engine_of(checkpoint, max_num_batched_tokens=5) as engine:
        engine.drafter = Scripted({(token,): [1] * 8 for token in (5, 6, 7)}, 4, 100)
        requests = {engine.add_request([token], SamplingParams(max_new_tokens=8)) for token in (5, 6, 7)}
        for _ in range(3):
            assert {output.request_id for output in engine.step()} == requests
        assert engine.speculation.num_drafted == 4  # two in each step but the first


def test_a_request_goes_back_to_its_prompt_at_most(checkpoint):
    with engine_of(checkpoint) as engine:
        request = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=4))
        engine.step()
        with pytest.raises(RequestError, match="a request cannot go back there") as caught:
            engine.rewind(request, 9)
        assert (caught.value.expected, caught.value.actual) == ("10 to 11 tokens", 9)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]), ([4, 1, 5, 1], [5, 1]), ([1, 2, 3], []), ([7], []), ([7, 7], [7])],
)
def test_the_latest_place_with_the_longest_match_is_looked_up(tokens, drafts):
    sequence = type("Known", (), {"token_ids": tokens})
    assert list(NgramDrafter(3).draft(sequence)) == drafts


def test_a_model_that_guesses_as_itself_is_always_right(checkpoint):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected, _ = continuations(checkpoint, params)
    options = {"num_speculative_tokens": 3, "draft_model": str(checkpoint.folder)}
    actual, engine = continuations(checkpoint, params, **options)
    assert actual == expected
    assert engine.speculation.num_accepted == engine.speculation.num_drafted > 0


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_another_model_s_guesses_change_no_token(checkpoints, backend):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected, _ = continuations(checkpoints["qwen3-next"], params)
    options = {
        "num_speculative_tokens": 3,
        "draft_model": str(checkpoints["llama"].folder),
        "attention_backend": backend,
    }
    actual, engine = continuations(checkpoints["qwen3-next"], params, **options)
    assert actual == expected
    assert engine.speculation.num_accepted < engine.speculation.num_drafted


def test_a_draft_model_stops_where_its_context_ends():
    assert DraftModel(Mock(max_model_len=10), 3).draft(Mock(num_tokens=10)) == []


def test_a_draft_model_that_cannot_guess_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"a draft model without drafts.*at least 1"):
        engine_of(checkpoint, draft_model=str(checkpoint.folder))
    small = tmp_path / "small"
    Qwen3ForCausalLM(Qwen3Config(**SIZES | {"vocab_size": 90}, head_dim=8)).save_pretrained(small)
    with pytest.raises(ConfigError, match=r"another vocabulary.*97 tokens, found 90"):
        engine_of(checkpoint, draft_model=str(small), num_speculative_tokens=2)
