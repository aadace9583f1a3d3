"""Prefix caching and forks in the whole engine: what is shared changes no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.errors import BlockError, CapacityError, ConfigError, RequestError

from .recorder import Recorder
from .schedules import finish
from .test_prefix_cache import two_bits

HEAD = [5, 9, 11, 20, 7, 8, 33, 41, 6, 50]
PROMPTS = [[*HEAD, 12, 13], [*HEAD, 12, 14, 15], HEAD[:7], [*HEAD, 12, 13], [60]]
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


def make_engine(checkpoint: Any, **changes: Any) -> LLMEngine:
    config = {"block_size": 3, "num_blocks": 60, "enable_prefix_caching": True, "debug_checks": True, **changes}
    return LLMEngine(checkpoint.folder, EngineConfig(**config), hash_function=two_bits)


def tokens_of(engine: LLMEngine, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def expected(checkpoints: Any) -> list[tuple[int, ...]]:
    return tokens_of(LLMEngine(checkpoints["qwen3"].folder))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("budget", [7, 2048])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_hit_is_a_cold_start(
    checkpoint: Any, expected: list[tuple[int, ...]], block_size: int, budget: int, max_num_seqs: int
) -> None:
    engine = make_engine(checkpoint, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    assert tokens_of(engine) == expected
    assert tokens_of(engine) == expected
    assert engine.pool.num_free == engine.pool.num_usable
    engine.pool.reset_prefix_cache()
    assert tokens_of(engine) == expected


def test_a_hit_skips_its_rows_and_is_read_back_whole(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(block_size=4, num_blocks=20, enable_prefix_caching=True))
    cold, warm = Recorder(), Recorder()
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    for recorder in (cold, warm):
        engine.observer = recorder
        engine.generate([PROMPTS[0]], params)
    assert [list(step.positions) for step in cold.steps] == [list(range(12)), [12], list(range(13))]
    assert [list(step.positions) for step in warm.steps] == [[8, 9, 10, 11], [12], list(range(13))]
    assert [step.phase for step in warm.steps] == ["prefill", "decode", "readback"]
    assert torch.equal(warm.taps[-1]["model.layers.1.k_cache"][:8], cold.taps[-1]["model.layers.1.k_cache"][:8])
    torch.testing.assert_close(warm.logits(1), cold.logits(0), rtol=1e-4, atol=1e-5)


def test_other_salts_do_not_hit(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(block_size=3, num_blocks=20, enable_prefix_caching=True))
    engine.observer = recorder = Recorder()
    for salt, num_rows in (("a", 10), ("b", 10), ("a", 1)):
        engine.generate([HEAD], SamplingParams(max_new_tokens=1, cache_salt=salt))
        assert len(recorder.steps[-2].positions) == num_rows


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [5, 2048])
def test_preemption_with_and_without_a_cache_changes_nothing(checkpoint: Any, budget: int, caching: bool) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    roomy = LLMEngine(checkpoint.folder).generate(PROMPTS, params)
    engine = make_engine(checkpoint, num_blocks=1 + 14, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    engine.observer = recorder = Recorder()
    tight = engine.generate(PROMPTS, params)
    assert [output.token_ids for output in tight] == [output.token_ids for output in roomy]
    assert sum(step.phase == "readback" for step in recorder.steps) > len(PROMPTS), "somebody was preempted"


@pytest.mark.parametrize("backend", ["paged", "contiguous", "recompute"])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 4}])
def test_a_fork_goes_on_as_its_original_would(
    checkpoint: Any, expected: list[tuple[int, ...]], backend: str, num_steps: int, limits: dict[str, int]
) -> None:
    paged = {"enable_prefix_caching": backend == "paged"}
    engine = make_engine(checkpoint, attention_backend=backend, max_model_len=64, **paged, **limits)
    parent = engine.add_request(PROMPTS[0], PARAMS)
    early = [output.token_id for _ in range(num_steps) for output in engine.step()]
    other_way = [*early, 44, 45]
    twin = engine.fork(parent)
    fork = engine.fork(parent, SamplingParams(max_new_tokens=8, forced_token_ids=other_way))
    tokens = finish(engine)
    assert (*early, *tokens[parent]) == (*early, *tokens[twin]) == expected[0]
    fresh = LLMEngine(checkpoint.folder).generate([PROMPTS[0]], engine_params(other_way))
    assert (*early, *tokens[fork]) == fresh[0].token_ids
    assert engine.pool.num_free == engine.pool.num_usable


def engine_params(forced: list[int]) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, forced_token_ids=forced)


def test_a_fork_shares_blocks_and_shows_only_its_own_rows(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(block_size=4, num_blocks=20))
    engine.observer = recorder = Recorder()
    parent = engine.add_request(HEAD, PARAMS)
    engine.step()
    child = engine.fork(parent)
    assert engine.pool.num_free == 19 - 3
    engine.step()
    assert list(recorder.steps[-1].request_ids) == [parent, child]
    assert list(recorder.steps[-1].positions) == [10, 10]
    tables = recorder.steps[-1].block_tables
    assert tables[parent][:2] == tables[child][:2]
    assert tables[parent][2] != tables[child][2]
    engine.abort(child)
    assert list(recorder.steps[-1].positions) == list(range(11)), "the past is read back with it"


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (SamplingParams(max_new_tokens=2), RequestError, "above the 2 tokens sampled so far, found 2"),
        (SamplingParams(cache_salt="b"), RequestError, "keeps its past and so its salt.*expected '', found 'b'"),
        (SamplingParams(max_new_tokens=300), RequestError, "at most 256 tokens, found 10 . 300 = 310"),
        (SamplingParams(max_new_tokens=200), CapacityError, "at most 59 blocks of 3 tokens"),
        (SamplingParams(forced_token_ids=[97]), RequestError, "0 <= id < 97, found 97"),
    ],
)
def test_an_impossible_fork_is_refused_and_changes_nothing(
    checkpoint: Any, params: SamplingParams, error: type[Exception], message: str
) -> None:
    engine = make_engine(checkpoint)
    parent = engine.add_request(HEAD, PARAMS)
    engine.step()
    engine.step()
    with pytest.raises(error, match=message):
        engine.fork(parent, params)
    assert set(finish(engine)) == {parent}
    with pytest.raises(RequestError, match=r"no such unfinished request, in LLMEngine.fork: expected one of \[\]"):
        engine.fork(parent)


@pytest.mark.parametrize("backend", ["contiguous", "recompute"])
def test_prefix_caching_without_blocks_is_refused(checkpoint: Any, backend: str) -> None:
    with pytest.raises(ConfigError, match=f"prefix caching needs blocks.*expected .*paged, found {backend}"):
        make_engine(checkpoint, attention_backend=backend, max_model_len=64)


def test_debug_checks_catch_a_block_that_is_freed_in_use(checkpoint: Any) -> None:
    engine = make_engine(checkpoint, enable_prefix_caching=False)
    engine.add_request(HEAD, PARAMS)
    engine.step()
    engine.pool.free([engine.scheduler.running[0].block_table[0]])
    with pytest.raises(BlockError, match="owner counts are not those of the block tables"):
        engine.step()
