"""Latent attention and grouped experts: by HF, under every schedule, and by what the cache holds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM

from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import CheckpointError, ConfigError, UnsupportedModelError
from reference_engine.families.experts import GroupedExperts
from reference_engine.loader import resolve_cache_spec
from reference_engine.parallel.worker import parallel_engine

from .conftest import Checkpoint, make_deepseek_v3
from .recorder import Recorder
from .schedules import NUM_NEW, PROMPTS, assert_ignored, every_schedule, greedy, random_schedule

LATENT, ROTATED = 28, 8
"""Numbers that `make_deepseek_v3` keeps of a token."""


@pytest.fixture
def checkpoint(checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints["deepseek-v3"]


# --- the engine ---------------------------------------------------------------------------------------------------


@every_schedule
def test_every_schedule_gives_transformers_tokens(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    expected = [tuple(checkpoint.greedy(prompt, NUM_NEW)) for prompt in PROMPTS]
    assert greedy(checkpoint.folder, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_models_and_schedules(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    num_groups, size = draw.choice([1, 2, 4]), draw.choice([2, 3])
    num_chosen = draw.randint(1, num_groups)
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": draw.choice([0.5, 4.0, 40.0]),
            "original_max_position_embeddings": 64, "mscale": draw.choice([1.0, 0.5]),
            "mscale_all_dim": draw.choice([0, 0.5, 1.0])}  # fmt: skip
    config = make_deepseek_v3(
        num_hidden_layers=draw.randint(1, 3), num_attention_heads=(heads := draw.choice([1, 2, 5])),
        num_key_value_heads=heads, q_lora_rank=draw.choice([None, 6, 33]), kv_lora_rank=draw.choice([3, 16, 40]),
        qk_nope_head_dim=draw.choice([1, 8, 24]), qk_rope_head_dim=draw.choice([2, 8, 16]),
        v_head_dim=draw.choice([1, 8, 20]), n_group=num_groups, n_routed_experts=num_groups * size,
        topk_group=num_chosen, num_experts_per_tok=draw.randint(1, num_chosen * size),
        first_k_dense_replace=draw.choice([0, 1, 3]), n_shared_experts=draw.choice([1, 2]),
        norm_topk_prob=draw.random() < 0.5, rope_interleave=draw.random() < 0.5, attention_bias=draw.random() < 0.5,
        rms_norm_eps=draw.choice([1e-3, 1e-6]),
        rope_parameters=yarn if draw.random() < 0.7 else {"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    expected = [tuple(Checkpoint(tmp_path, model).greedy(prompt, NUM_NEW)) for prompt in PROMPTS]
    assert greedy(tmp_path, **random_schedule(draw)) == expected


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_the_cache_holds_what_transformers_caches(checkpoint: Checkpoint, backend: str) -> None:
    recorder = Recorder()
    with LLMEngine(checkpoint.folder, EngineConfig(attention_backend=backend), observer=recorder) as engine:
        (output,) = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert engine.backend.cache is not None
        assert engine.backend.cache.data.shape[4:] == (1, LATENT + ROTATED)
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[0], *output.token_ids[:-1]]])
        made = checkpoint.model(ids, use_cache=True)
    cache = made.get("cache") or made["past_key_values"]  # its name before transformers 5.24
    taps = recorder.taps[-1]
    for number, layer in enumerate(cache.layers):
        for name, expected in (("k_cache", layer.keys), ("v_cache", layer.values)):
            actual = taps[f"model.layers.{number}.{name}"]
            torch.testing.assert_close(actual, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_a_token_takes_the_room_of_its_latent(checkpoint: Checkpoint) -> None:
    """One of 6 heads with keys of 18 and values of 14 would take 192 numbers in each of the two layers."""
    with LLMEngine(checkpoint.folder, EngineConfig(block_size=4, num_blocks=5, dtype="bfloat16")) as engine:
        assert engine.backend.cache is not None
        assert engine.backend.cache.data.nbytes == 5 * 4 * 2 * (LATENT + ROTATED) * 2
    runner = engine.runner
    spec = resolve_cache_spec(checkpoint.folder, EngineConfig(), runner.model_config, runner.dtype, runner.device)
    assert spec.default_num_blocks(1 << 20) == 1 + spec.budget_bytes // (2 * (LATENT + ROTATED) * 2 << 20)


def test_latents_are_not_kept_in_another_dtype(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="latents are not kept in another dtype"):
        LLMEngine(checkpoint.folder, EngineConfig(kv_cache_dtype="float8_e4m3fn"))


@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_precision_stays_near(dtype: str, allowed: float, tmp_path: Path) -> None:
    """Every expert is chosen: a choice that falls the other way is no rounding."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(make_deepseek_v3(topk_group=4, num_experts_per_tok=8)).eval()
    model.save_pretrained(tmp_path)
    recorder, forced = Recorder(), [5, 9, 11, 20]
    with LLMEngine(tmp_path, EngineConfig(dtype=dtype), observer=recorder) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5, forced_token_ids=forced))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = Checkpoint(tmp_path, model).logits([*prompt, *forced])[len(prompt) - 1 :]
        error = (recorder.logits(output.request_id) - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < allowed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_router_stays_in_float32(checkpoint: Checkpoint, dtype: str) -> None:
    with LLMEngine(checkpoint.folder, EngineConfig(dtype=dtype)) as engine:
        experts = engine.runner.model.layers[1].mlp  # type: ignore[attr-defined]
        assert isinstance(experts, GroupedExperts)
        assert experts.router.weight_OI.dtype == experts.correction_E.dtype == torch.float32
        assert experts.experts[0].gate_up_proj.weight_OI.dtype == getattr(torch, dtype)


def test_tensors_of_the_next_token_s_predictor_are_ignored(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_ignored("model.layers.61.eh_proj.weight", checkpoint.folder, tmp_path)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_what_latent_attention_is_not_served_with_is_refused(checkpoint: Checkpoint) -> None:
    with (
        pytest.raises(ConfigError, match="latent attention is not split"),
        parallel_engine(checkpoint.folder, EngineConfig(), 2),
    ):
        pass
    with pytest.raises(ConfigError, match=r"adapters are not served with this.*latent attention"):
        LLMEngine(checkpoint.folder, adapters={"one": "nowhere"})
    pytest.importorskip("reference_engine.fast")
    with pytest.raises(ConfigError, match=r"backend cpp does not serve.*latents, which are both.*paged, contiguous"):
        LLMEngine(checkpoint.folder, EngineConfig(attention_backend="cpp"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_key_value_heads": 2}, UnsupportedModelError, "num_key_value_heads with latent attention.*= 6, found 2"),
        ({"kv_lora_rank": 0}, ConfigError, "kv_lora_rank is impossible"),
        ({"qk_rope_head_dim": 7}, ConfigError, "rotary embedding needs pairs.*found 7"),
        ({"first_k_dense_replace": -1}, ConfigError, "first_k_dense_replace is impossible.*above -1"),
        ({"n_group": 3}, ConfigError, "groups of experts are impossible.*8 experts, n_group 3"),
        ({"n_group": 8}, ConfigError, "groups of experts are impossible.*two or more"),
        ({"topk_group": 5}, ConfigError, "groups of experts are impossible"),
        ({"num_experts_per_tok": 5}, ConfigError, "groups of experts are impossible"),
        ({"scoring_func": "softmax"}, UnsupportedModelError, "unsupported scoring_func.*sigmoid, found softmax"),
        ({"topk_method": "greedy"}, UnsupportedModelError, "unsupported topk_method"),
        ({"moe_layer_freq": 2}, UnsupportedModelError, "unsupported moe_layer_freq"),
        ({"rope_interleave": "yes"}, ConfigError, "rope_interleave is impossible"),
        ({"model_type": "deepseek_v2"}, UnsupportedModelError, "unsupported model_type"),
    ],
)
def test_a_bad_config_names_its_field(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    config = {**make_deepseek_v3().to_dict(), "architectures": ["DeepseekV3ForCausalLM"], **changes}
    with pytest.raises(error, match=message):
        ModelConfig.from_dict(config)


def test_a_missing_correction_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((checkpoint.folder / "config.json").read_text())))
    weights = load_file(checkpoint.folder / "model.safetensors")
    del weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.mlp.gate.e_score_correction_bias"):
        LLMEngine(tmp_path)
