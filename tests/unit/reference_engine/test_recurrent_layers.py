"""Gated delta nets and the states that they go on from: by definition, by HF, and under every schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3NextForCausalLM

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.checkpoint.delta_net import DeltaNetShape
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import BlockError, ConfigError, UnsupportedModelError
from reference_engine.families.qwen3_next import gated_delta_rule
from reference_engine.families.state_cache import Piece, StateCache, StateSpec
from reference_engine.parallel.worker import parallel_engine
from reference_engine.requests.sequence import ScheduledChunk, Sequence

from .conftest import Checkpoint, make_qwen3_next
from .recorder import Recorder
from .schedules import NUM_NEW, PROMPTS, assert_ignored, every_schedule, finish, greedy, random_schedule


@pytest.fixture
def checkpoint(checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints["qwen3-next"]


# --- the rule -----------------------------------------------------------------------------------------------------


def by_definition(q, k, v, decay, beta, state):
    """Token by token, in float64: fade, correct what is read at the key, read at the query."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        missed = v[:, t] - torch.einsum("rnah,rna->rnh", state, k[:, t])
        state = state + torch.einsum("rna,rnh->rnah", k[:, t], beta[:, t, :, None] * missed)
        outs.append(torch.einsum("rnah,rna->rnh", state, q[:, t]) / q.shape[-1] ** 0.5)
    return torch.stack(outs, dim=1), state


def random_rows(num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    heads = (2, num_tokens, 3)
    q, k, v = (torch.randn(*heads, width, generator=generator) for width in (8, 8, 12))
    decay, beta = -torch.rand(heads, generator=generator), torch.rand(heads, generator=generator)
    return q, k, v, decay, beta, torch.randn(2, 3, 8, 12, generator=generator)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 150])
def test_the_rule_is_its_definition(num_tokens: int) -> None:
    rows = random_rows(num_tokens, seed=num_tokens)
    for actual, expected in zip(gated_delta_rule(*rows), by_definition(*rows), strict=True):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("split", [1, 7, 64])
def test_the_rule_goes_on_from_its_state(split: int) -> None:
    *rows, state = random_rows(90, seed=3)
    whole, last = gated_delta_rule(*rows, state)
    first, between = gated_delta_rule(*(x[:, :split] for x in rows), state)
    second, end = gated_delta_rule(*(x[:, split:] for x in rows), between)
    assert (torch.cat([first, second], dim=1) - whole).norm() < 1e-5 * whole.norm()
    assert (end - last).norm() < 1e-5 * last.norm()


# --- states by block ----------------------------------------------------------------------------------------------


def make_states(num_guesses: int = 0) -> StateCache:
    shape = DeltaNetShape(num_key_heads=1, num_value_heads=1, key_head_dim=2, value_head_dim=2, kernel_size=3)
    spec = StateSpec(num_layers=2, shape=shape, dtype=torch.float32, device=torch.device("cpu"))
    return StateCache(spec, num_blocks=6, block_size=4, num_guesses=num_guesses)


def make_chunk(start: int, stop: int, num_drafts: int = 0) -> ScheduledChunk:
    sequence = Sequence(request_id=0, token_ids=[*range(stop)], num_prompt_tokens=stop, params=SamplingParams())
    sequence.block_table.extend([3, 5, 2])
    sequence.num_drafts = num_drafts
    return ScheduledChunk(sequence, start, stop)


def test_rows_are_cut_at_the_ends_of_blocks() -> None:
    states = make_states()
    assert states.plan([make_chunk(0, 10)]) == [
        Piece(0, 4, NULL_BLOCK, 3), Piece(4, 8, 3, 5), Piece(8, 10, 5, 2)
    ]  # fmt: skip
    assert [states.num_tokens[block] for block in (3, 5, 2)] == [4, 8, 10]


def test_a_guess_has_a_state_of_its_own_until_it_is_accepted() -> None:
    states = make_states()
    states.plan([make_chunk(0, 6)])
    states.recurrent_LBNAH[:, 5] = 6.0
    pieces = states.plan([make_chunk(6, 10, num_drafts=3)])
    assert pieces == [Piece(0, 1, 5, 5), Piece(1, 2, 5, 6), Piece(2, 3, 6, 7), Piece(3, 4, 7, 8)]
    for number, tokens in ((5, 7.0), (6, 8.0), (7, 9.0), (8, 10.0)):
        states.recurrent_LBNAH[:, number] = tokens
    states.accept([5 * 4 + 2, 5 * 4 + 3, 2 * 4])  # the row that is known, and two guesses of three
    assert [states.recurrent_LBNAH[0, block].mean() for block in (5, 2)] == [8, 9]
    assert (states.num_tokens[5], states.num_tokens[2]) == (8, 9)


def test_a_request_goes_on_where_its_state_ends_or_not_at_all() -> None:
    states = make_states()
    states.plan([make_chunk(0, 6)])
    with pytest.raises(BlockError, match=r"does not go on where its state ends.*5 tokens"):
        states.plan([make_chunk(5, 8)])


# --- the engine ---------------------------------------------------------------------------------------------------


@every_schedule
def test_every_schedule_gives_transformers_tokens(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    expected = [tuple(checkpoint.greedy(prompt, NUM_NEW)) for prompt in PROMPTS]
    assert greedy(checkpoint.folder, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_models_and_schedules(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    num_layers = draw.randint(1, 4)
    num_key_heads = draw.choice([1, 2, 3])
    kinds = draw.choices(["linear_attention", "full_attention"], k=num_layers - 1)
    config = make_qwen3_next(
        num_hidden_layers=num_layers,
        layer_types=draw.sample([*kinds, "full_attention"], num_layers),  # transformers wants one that attends
        linear_num_key_heads=num_key_heads, linear_num_value_heads=num_key_heads * draw.choice([1, 2, 3]),
        linear_key_head_dim=draw.choice([4, 6, 16]), linear_value_head_dim=draw.choice([4, 10]),
        linear_conv_kernel_dim=draw.choice([1, 2, 4, 7]), num_experts=draw.choice([0, 5]), num_experts_per_tok=2,
        mlp_only_layers=[],
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0])},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    expected = [tuple(Checkpoint(tmp_path, model).greedy(prompt, NUM_NEW)) for prompt in PROMPTS]
    assert greedy(tmp_path, **random_schedule(draw)) == expected


def test_a_prefix_brings_its_state_along(checkpoint: Checkpoint) -> None:
    """Of 28 tokens, 24 are found, and none of them is computed again."""
    recorder, options = Recorder(), {"block_size": 4, "enable_prefix_caching": True}
    with LLMEngine(checkpoint.folder, EngineConfig(debug_checks=True, **options)) as engine:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        engine.generate([PROMPTS[0]], params)
        engine.observer = recorder
        (output,) = engine.generate([PROMPTS[1]], params)
    assert list(recorder.steps[0].positions) == [24, 25, 26, 27]
    assert list(output.token_ids) == checkpoint.greedy(PROMPTS[1], 3)


def test_a_fork_and_its_original_go_on_from_one_state(checkpoint: Checkpoint) -> None:
    with LLMEngine(checkpoint.folder, EngineConfig(block_size=8, debug_checks=True)) as engine:
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        first = engine.add_request(PROMPTS[0], params)
        (begin,) = (item.token_id for item in engine.step())
        forced = SamplingParams(max_new_tokens=6, forced_token_ids=[begin, 17, 23], ignore_eos=True)
        fork = engine.fork(first, forced)
        made = finish(engine)
    original, forked = ([begin, *made[request]] for request in (first, fork))
    assert original == checkpoint.greedy(PROMPTS[0], 6)
    assert forked[3:] == checkpoint.greedy([*PROMPTS[0], *forked[:3]], 3)


@pytest.mark.parametrize("num_tokens", [37, 39, 41])
def test_going_back_computes_its_block_again(checkpoint: Checkpoint, num_tokens: int) -> None:
    recorder, num_kept = Recorder(), num_tokens - len(PROMPTS[0])
    with LLMEngine(checkpoint.folder, EngineConfig(block_size=8, debug_checks=True)) as engine:
        request = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=8, ignore_eos=True))
        made = [output.token_id for _ in range(6) for output in engine.step()]
        engine.rewind(request, num_tokens)
        engine.observer = recorder
        again = finish(engine)[request]
    assert recorder.steps[0].positions[0] == (num_tokens - 1) // 8 * 8
    assert [*made[:num_kept], *again] == checkpoint.greedy(PROMPTS[0], 8)


def test_after_a_step_that_failed_a_request_is_suspended_and_resumed(checkpoint: Checkpoint) -> None:
    """Some of its states are those after the step, others those before it."""
    with LLMEngine(checkpoint.folder, EngineConfig(block_size=8)) as engine:
        request = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=4, ignore_eos=True))
        made = [output.token_id for output in engine.step()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.runner.model.layers[1].__class__, "__call__", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        with pytest.raises(BlockError, match=r"does not go on where its state ends.*suspend the request and resume"):
            engine.step()
        engine.suspend(request)
        engine.resume(request)
        made += finish(engine)[request]
    assert made == checkpoint.greedy(PROMPTS[0], 4)


def test_tensors_that_transformers_ignores_are_ignored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_ignored("mtp.norm.weight", checkpoint.folder, tmp_path)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_what_would_leave_the_states_out_is_refused(checkpoint: Checkpoint) -> None:
    with (
        pytest.raises(ConfigError, match="recurrent layers are not split"),
        parallel_engine(checkpoint.folder, EngineConfig(), 2),
    ):
        pass
    with pytest.raises(ConfigError, match="recurrent layers are not compiled"):
        LLMEngine(checkpoint.folder, EngineConfig(compile_layers=True))
    with pytest.raises(ConfigError, match=r"adapters are not served with this.*recurrent layers"):
        LLMEngine(checkpoint.folder, adapters={"one": "nowhere"})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["linear_attention"]}, ConfigError, "layer_types is impossible.*3 of linear_attention"),
        ({"layer_types": ["mamba"] * 3}, ConfigError, "layer_types is impossible"),
        ({"linear_num_key_heads": 3}, ConfigError, "value heads do not divide.*multiple of linear_num_key_heads = 3"),
        ({"linear_conv_kernel_dim": 0}, ConfigError, "linear_conv_kernel_dim is impossible"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, UnsupportedModelError, "at most 1.0, found 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, ConfigError, "needs pairs.*found 3"),
    ],
)
def test_a_bad_config_names_its_field(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    config = {**make_qwen3_next().to_dict(), "architectures": ["Qwen3NextForCausalLM"], **changes}
    with pytest.raises(error, match=message):
        ModelConfig.from_dict(config)


def test_every_fourth_layer_attends_where_config_json_names_none() -> None:
    config = {**make_qwen3_next(num_hidden_layers=8, layer_types=None).to_dict(), "layer_types": None}
    read = ModelConfig.from_dict({**config, "architectures": ["Qwen3NextForCausalLM"]})
    assert read.attention_layers == (3, 7)
