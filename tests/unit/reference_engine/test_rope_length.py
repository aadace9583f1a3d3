"""Requests whose length decides their rotary frequencies, under all that an engine with a cache does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.engine import LLMEngine
from reference_engine.errors import RequestError, UnsupportedModelError
from reference_engine.requests.sampling import SamplingParams

from .conftest import SIZES
from .recorder import Recorder

ORIGINAL = 16
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 50.0, "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.5, 3.5, 4.5],
    },
}  # fmt: skip
HEAD = [5, 9, 2, 44, 71, 3, 18, 60, 33]
PROMPTS = [HEAD, [*HEAD, 12, 80], [*HEAD, 7, 7, 30, 41, 8, 6, 90, 14, 25], [60, 3]]
LENGTHS = [7, 8, 6, 9]
"""New tokens, so that two requests stay within the original context, one crosses it and one begins beyond it."""


@pytest.fixture(scope="module", params=ROPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {**SIZES, "max_position_embeddings": ORIGINAL, "rope_parameters": dict(ROPES[request.param])}
    made = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    made.save_pretrained(folder)
    return folder, made


@torch.no_grad()
def transformers_logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """[T, V] of one forward over all tokens, by a rotary embedding that has seen no other request."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model(torch.tensor([token_ids])).logits[0]


def params(num_new: int, *tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, forced_token_ids=tokens or None, ignore_eos=True)


def check(engine: LLMEngine, model: LlamaForCausalLM, requests: dict[int, list[int]]) -> None:
    """Run to the end, and compare each row's logits with those of a forward over all that the request computes."""
    engine.observer = recorder = Recorder()
    while engine.has_unfinished():
        engine.step()
    for number, token_ids in requests.items():
        actual = recorder.logits(number)
        torch.testing.assert_close(actual, transformers_logits(model, token_ids)[-len(actual) :], rtol=1e-4, atol=1e-4)


def add_all(engine: LLMEngine) -> dict[int, list[int]]:
    """Add each prompt with tokens that are forced, and return what each request computes."""
    added = {}
    for prompt, num_new in zip(PROMPTS, LENGTHS, strict=True):
        forced = [(token * 7 + num_new) % 97 for token in range(num_new)]
        added[engine.add_request(prompt, params(num_new, *forced))] = [*prompt, *forced[:-1]]
    return added


def opened(folder: Path, **options: Any) -> LLMEngine:
    return LLMEngine(folder, EngineConfig(**{"block_size": 4, "debug_checks": True, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"enable_prefix_caching": True, "max_num_batched_tokens": 5},
        {"num_blocks": 8},
        {"num_speculative_tokens": 2},
        {"attention_backend": "recompute"},
        {"attention_backend": "cpp"},
    ],
    ids=["alone", "chunked", "preempted", "speculative", "recompute", "fused"],
)
def test_every_row_is_that_of_one_forward(model: tuple[Path, LlamaForCausalLM], options: dict[str, Any]) -> None:
    folder, theirs = model
    if options.get("attention_backend") == "cpp":
        pytest.importorskip("reference_engine.fast")
    with opened(folder, **options) as engine:
        check(engine, theirs, add_all(engine))


def test_keys_of_other_frequencies_are_not_found(model: tuple[Path, LlamaForCausalLM]) -> None:
    """A block is found by a request whose frequencies are the same, and by no other."""
    folder, theirs = model
    is_dynamic = engine_rope(folder) == "dynamic"
    with opened(folder, enable_prefix_caching=True) as engine:
        for prompt, num_new, num_rows in (
            (HEAD, 7, 9), (HEAD, 4, 1), (HEAD, 9, 9), (HEAD, 10, 9 if is_dynamic else 1), (HEAD, 8, 1), (HEAD, 9, 1),
        ):  # fmt: skip
            number = engine.add_request(prompt, params(num_new, *range(num_new)))
            engine.observer = recorder = Recorder()
            engine.step()
            assert len(recorder.steps[0].positions) == num_rows
            check(engine, theirs, {number: [*prompt, *range(num_new - 1)]})


def engine_rope(folder: Path) -> str:
    return ModelConfig.from_folder(folder).rope.rope_type


@pytest.mark.parametrize("num_new", [6, 12])
def test_a_fork_and_a_rewound_request_follow_their_own_length(
    model: tuple[Path, LlamaForCausalLM], num_new: int
) -> None:
    """The original computes 14 tokens; what goes on to 20 shares none of its keys."""
    folder, theirs = model
    with opened(folder, enable_prefix_caching=True) as engine:
        parent = engine.add_request(HEAD, params(6, *range(6)))
        for _ in range(3):
            engine.step()
        tokens = [0, 1, 2, *range(50, 47 + num_new)]
        fork = engine.fork(parent, params(num_new, *tokens))
        check(engine, theirs, {parent: [*HEAD, *range(5)], fork: [*HEAD, *tokens[:-1]]})
        number = engine.add_request(HEAD, params(6, *range(6)))
        for _ in range(4):
            engine.step()
        engine.rewind(number, len(HEAD) + 1, params(num_new, 0, *range(60, 59 + num_new)))
        check(engine, theirs, {number: [*HEAD, 0, *range(60, 58 + num_new)]})


def test_the_context_is_the_stretched_one(model: tuple[Path, LlamaForCausalLM]) -> None:
    folder, _ = model
    with opened(folder) as engine:
        assert engine.runner.max_model_len == 4 * ORIGINAL
        engine.add_request([5] * 60, params(4))
        with pytest.raises(RequestError, match="at most 64 tokens, found 60"):
            engine.add_request([5] * 60, params(5))
        graphs = pytest.importorskip("reference_engine.fast.graphs")
        assert not graphs.is_capturable(engine.runner.model)


def test_layers_with_a_window_have_fixed_frequencies() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": rope}
    sizes = {**SIZES, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5}
    with pytest.raises(UnsupportedModelError, match=r"layers with a window.*found dynamic"):
        ModelConfig.from_dict({"model_type": "gemma3_text", **sizes, "rope_parameters": ropes})
