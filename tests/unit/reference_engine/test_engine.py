"""The engine against transformers: every family, backend, block size and schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reference_engine import EngineConfig, FinishReason, LLMEngine, SamplingParams
from reference_engine.errors import CapacityError, ConfigError, DeviceError, RequestError

from .recorder import Recorder

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "qwen2-sliding", "gemma3", "qwen3-moe", "qwen3-next",
            "deepseek-v3", "stories260k"]  # fmt: skip
WITHOUT_FLIPS = [family for family in FAMILIES if family != "deepseek-v3"]
"""Families whose tokens go to the same experts after rounding; see test_latent_attention.py for the other one."""
SCHEDULES: dict[str, dict[str, int]] = {
    "whole": {"max_num_seqs": 1},
    "batched": {},
    **{f"chunked-{size}": {"max_num_batched_tokens": size} for size in (1, 7, 16)},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"paged-{size}": {"block_size": size} for size in (1, 3, 16, 256)},
    "contiguous": {"attention_backend": "contiguous"},
    "recompute": {"attention_backend": "recompute"},
}
PROMPT_LENS = (37, 5, 18)
NUM_NEW = 5


def make_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENS]


@pytest.fixture(scope="session")
def goldens(checkpoints: Any) -> dict[str, list[tuple[list[int], list[int], torch.Tensor]]]:
    """Prompt, greedy continuation, and logits of the sampled rows, of each request of each family."""
    made: dict[str, list[tuple[list[int], list[int], torch.Tensor]]] = {}
    for family, checkpoint in checkpoints.items():
        made[family] = []
        for prompt in make_prompts(checkpoint.vocab_size):
            continuation = checkpoint.greedy(prompt, NUM_NEW)
            logits = checkpoint.logits([*prompt, *continuation[:-1]])[len(prompt) - 1 :]
            made[family].append((prompt, continuation, logits))
    return made


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return float(error.max())


@pytest.mark.sampled(80)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_transformers(
    family: str, schedule: str, layout: str, checkpoints: Any, goldens: Any
) -> None:
    if family not in checkpoints:
        pytest.skip("stories260k is not on this machine")
    config = EngineConfig(dtype="float32", max_model_len=64, **SCHEDULES[schedule], **LAYOUTS[layout])
    recorder = Recorder()
    engine = LLMEngine(checkpoints[family].folder, config, observer=recorder)
    prompts = [prompt for prompt, _, _ in goldens[family]]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True))
    for output, (_, continuation, logits) in zip(outputs, goldens[family], strict=True):
        assert list(output.token_ids) == continuation
        assert relative_l2(recorder.logits(output.request_id), logits) < 1e-5
    assert engine.pool.num_free == engine.pool.num_usable


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["paged", "contiguous", "recompute"])
@pytest.mark.parametrize("checkpoint", WITHOUT_FLIPS, indirect=True)
def test_half_precision_stays_near(checkpoint: Any, backend: str, dtype: str) -> None:
    prompts = make_prompts(checkpoint.vocab_size)
    recorder = Recorder()
    engine = LLMEngine(checkpoint.folder, EngineConfig(dtype=dtype, attention_backend=backend), observer=recorder)
    forced = [5, 9, 11, 20]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=5, forced_token_ids=forced))
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = recorder.logits(output.request_id)
        assert logits.dtype == getattr(torch, dtype)
        expected = checkpoint.logits([*prompt, *forced])[len(prompt) - 1 :]
        allowed = {"bfloat16": 0.05, "float16": 0.01}[dtype]
        if checkpoint.model.config.model_type == "qwen3_next":  # whose recurrence enlarges roundings
            rounded = checkpoint.logits([*prompt, *forced], dtype=getattr(torch, dtype))[len(prompt) - 1 :]
            allowed = max(allowed, 2 * relative_l2(rounded, expected))
        assert relative_l2(logits, expected) < allowed


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_what_lies_in_unwritten_slots_does_not_matter(checkpoint: Any, goldens: Any, backend: str) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(attention_backend=backend, max_model_len=64))
    engine.backend.cache.data[:, :, 1:] = torch.nan
    outputs = engine.generate([p for p, _, _ in goldens["qwen3"]], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [tokens for _, tokens, _ in goldens["qwen3"]]


@pytest.mark.parametrize("budget", [5, 2048])
@pytest.mark.parametrize("checkpoint", ["llama", "qwen3"], indirect=True)
def test_preempted_requests_end_as_if_nothing_had_happened(checkpoint: Any, budget: int) -> None:
    prompts = make_prompts(checkpoint.vocab_size)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    roomy = LLMEngine(checkpoint.folder).generate(prompts, params)
    recorder = Recorder()
    config = EngineConfig(block_size=3, num_blocks=1 + 25, max_num_batched_tokens=budget)
    engine = LLMEngine(checkpoint.folder, config, observer=recorder)
    tight = engine.generate(prompts, params)
    assert [output.token_ids for output in tight] == [output.token_ids for output in roomy]
    assert engine.pool.num_free == engine.pool.num_usable
    assert sum(step.phase == "readback" for step in recorder.steps) > len(prompts), "somebody was preempted"


def test_forced_tokens_are_fed_and_own_choices_reported(checkpoint: Any) -> None:
    prompt, forced = [4, 5, 6], [7, 8]
    output = LLMEngine(checkpoint.folder).generate([prompt], SamplingParams(max_new_tokens=4, forced_token_ids=forced))
    choices = checkpoint.logits([*prompt, *forced]).argmax(dim=-1)[2:].tolist()
    assert list(output[0].sampled_token_ids[:3]) == choices
    assert output[0].token_ids[:3] == (7, 8, choices[2])


def test_generation_stops_at_eos_unless_told_to_go_on(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    eos = 3
    forced = [7, eos, 9]
    stopping = SamplingParams(max_new_tokens=3, forced_token_ids=forced, ignore_eos=False)
    (output,) = engine.generate([[4]], stopping)
    assert (output.token_ids, output.finish_reason) == ((7, eos), FinishReason.EOS)
    (output,) = engine.generate([[4]], SamplingParams(max_new_tokens=3, forced_token_ids=forced))
    assert (output.token_ids, output.finish_reason) == ((7, eos, 9), FinishReason.LENGTH)


def test_steps_stream_tokens_of_requests_that_come_and_go(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    expected = engine.generate([[4, 5], [6, 7, 8]], params)
    first = engine.add_request([4, 5], params)
    streamed = {first: [engine.step()[0].token_id]}
    second = engine.add_request([6, 7, 8], params)
    streamed[second] = []
    while engine.has_unfinished():
        for token in engine.step():
            streamed[token.request_id].append(token.token_id)
    assert [tuple(streamed[first]), tuple(streamed[second])] == [output.token_ids for output in expected]
    assert engine.step() == []


def test_an_aborted_request_leaves_no_trace(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    kept, running = engine.add_request([4, 5], params), engine.add_request([6], params)
    engine.step()
    waiting = engine.add_request([7], params)
    engine.abort(running)
    engine.abort(waiting)
    tokens = []
    while engine.has_unfinished():
        tokens += engine.step()
    assert {token.request_id for token in tokens} == {kept}
    assert engine.pool.num_free == engine.pool.num_usable
    with pytest.raises(RequestError, match=r"expected one of \[\], found 1"):
        engine.abort(running)


def test_each_prompt_may_have_its_own_params(checkpoint: Any) -> None:
    params = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in (1, 4)]
    outputs = LLMEngine(checkpoint.folder).generate([[4], [5]], params)
    assert [len(output.token_ids) for output in outputs] == [1, 4]


def test_a_refused_prompt_refuses_the_call_and_queues_nothing(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder)
    with pytest.raises(RequestError, match="empty"):
        engine.generate([[4], []])
    with pytest.raises(RequestError, match="expected 2 params, found 1"):
        engine.generate([[4], [5]], [SamplingParams()])
    assert not engine.has_unfinished()
    engine.add_request([4])
    with pytest.raises(RequestError, match="no unfinished request, found 1"):
        engine.generate([[4]])


def test_a_failing_observer_leaves_the_engine_empty(checkpoint: Any) -> None:
    class Failing(Recorder):
        def tap(self, name: str, tensor: torch.Tensor) -> None:
            raise OSError("disk full")

    observer = Failing()
    engine = LLMEngine(checkpoint.folder, observer=observer)
    with pytest.raises(OSError, match="disk full"):
        engine.generate([[4, 5]])
    assert engine.observer is observer
    assert not engine.has_unfinished()
    assert engine.pool.num_free == engine.pool.num_usable


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"attention_backend": "flash"}, ConfigError, "expected one of paged, contiguous, recompute, found flash"),
        ({"max_model_len": 257}, ConfigError, "at most 256, by max_position_embeddings and .*, found 257"),
        ({"device": "mps"}, DeviceError, "expected cpu, cuda, cuda:N, found mps"),
        ({"device": "gpu0"}, DeviceError, "not a device.*found gpu0"),
        ({"device": "cuda:99"}, DeviceError, 'CUDA device is not there.*found cuda:99.*device="cpu"'),
        ({"num_blocks": 10**13}, CapacityError, "does not fit into memory"),
    ],
)
def test_an_impossible_engine_is_refused(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")  # the backends that are named depend on it
    with pytest.raises(error, match=message):
        LLMEngine(checkpoint.folder, EngineConfig(**change))


def test_requests_are_held_to_model_and_pool(checkpoint: Any) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(block_size=16, num_blocks=3))
    with pytest.raises(CapacityError, match="at most 2 blocks of 16 tokens, found 33 tokens = 3 blocks"):
        engine.add_request([4] * 30, SamplingParams(max_new_tokens=4))
    with pytest.raises(RequestError, match="at most 256 tokens"):
        engine.add_request([4] * 250)
    with pytest.raises(RequestError, match="0 <= id < 97, found 97"):
        engine.add_request([97])


def test_auto_is_the_checkpoint_s_dtype(checkpoint: Any) -> None:
    assert LLMEngine(checkpoint.folder).runner.dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["paged", "contiguous", "recompute"])
def test_cuda_agrees(checkpoint: Any, goldens: Any, backend: str) -> None:
    engine = LLMEngine(checkpoint.folder, EngineConfig(device="cuda", attention_backend=backend, max_model_len=64))
    outputs = engine.generate([p for p, _, _ in goldens["qwen3"]], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [tokens for _, tokens, _ in goldens["qwen3"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_samples(checkpoint: Any) -> None:
    """By top-k and by top-p, with log probabilities: the numbers of each row go to the device."""
    engine = LLMEngine(checkpoint.folder, EngineConfig(device="cuda", max_model_len=64))
    params = [
        SamplingParams(temperature=0.8, top_k=2, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=3),
    ]
    outputs = engine.generate(
        [[5, 6, 7], [8, 9]], [replace(parameter, max_new_tokens=4, ignore_eos=True) for parameter in params]
    )
    assert [len(output.token_ids) for output in outputs] == [4, 4]
