from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.errors import ConfigError, EngineError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def test_sizes_and_defaults() -> None:
    config = ModelConfig.from_dict({**LLAMA, "num_key_value_heads": None})
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    switches = (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings)
    assert not any(switches)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 10000.0)


@pytest.mark.parametrize(
    ("model_type", "architecture", "expected"),
    [
        ("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True, "o_bias": False, "qk_norm": False, "head_dim": 8}),
        ("qwen3", "Qwen3ForCausalLM", {"qkv_bias": False, "o_bias": False, "qk_norm": True, "head_dim": 128}),
    ],
)
def test_families_differ_by_table(model_type: str, architecture: str, expected: dict[str, object]) -> None:
    config = ModelConfig.from_dict({**LLAMA, "model_type": model_type, "architectures": [architecture]})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_llama_biases_follow_the_config(name: str) -> None:
    config = ModelConfig.from_dict({**LLAMA, name: True})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (
        (True, True, False) if name == "attention_bias" else (False, False, True)
    )


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}},
    ],
    ids=["rope_scaling", "type", "rope_parameters"],
)
def test_both_spellings_of_rope_are_one(spelling: dict[str, object]) -> None:
    rope = ModelConfig.from_dict({**LLAMA, **spelling}).rope
    assert (rope.rope_type, rope.theta) == ("llama3", 5e5)
    assert {name: rope.parameters[name] for name in SCALING} == SCALING


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    Qwen3Config(architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (4096, 128, 32)


@pytest.mark.parametrize(
    ("generation", "expected"), [({}, {2}), ({"eos_token_id": [5, 6]}, {5, 6}), ({"eos_token_id": 7}, {7})]
)
def test_generation_config_decides_on_eos(tmp_path: Path, generation: dict[str, object], expected: set[int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError, "expected one of llama, qwen2, qwen3, mistral.*, found gpt2"),
        ({"model_type": None}, UnsupportedModelError, "unsupported model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedModelError, "expected LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "unsupported hidden_act.*expected silu, found gelu"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantised weights"),
        ({"layer_types": ["sliding_attention"] * 2}, UnsupportedModelError, "sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            UnsupportedModelError,
            "sliding_attention",
        ),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor.*found 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedModelError, "one set for all layers"),
        ({"rope_parameters": [1]}, ConfigError, "rope_parameters is no object"),
        ({"vocab_size": None}, ConfigError, "vocab_size is missing"),
        ({"hidden_size": "32"}, ConfigError, "hidden_size is impossible.*found '32'"),
        ({"num_hidden_layers": 10**30}, ConfigError, "num_hidden_layers.*at most 10000, found 10+"),
        ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers.*found 0"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps.*found nan"),
        ({"num_key_value_heads": 3}, ConfigError, "a multiple of num_key_value_heads = 3, found 4"),
        ({"head_dim": 7}, ConfigError, "an even head_dim, times partial_rotary_factor, found 7"),
        ({"tie_word_embeddings": 1}, ConfigError, "expected true or false, found 1"),
        ({"eos_token_id": "</s>"}, ConfigError, "eos_token_id is no token id"),
    ],
)
def test_a_bad_config_names_field_and_value(change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.from_dict({**LLAMA, **change})


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing, in .*Give the folder of a HuggingFace checkpoint"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*LLAMA, "rope_parameters", "rope_scaling", "rope_theta", "head_dim", "layer_types", "max_window_layers"]


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*FIELDS, "eos_token_id", "sliding_window"]), JSON, max_size=3))
def test_any_json_is_read_or_refused_by_name(changes: dict[str, object]) -> None:
    refused_at = "config.json"
    try:
        ModelConfig.from_dict({**LLAMA, "use_sliding_window": True, **changes})
    except EngineError as error:
        refused_at = str(error.where)
    assert refused_at == "config.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size.*at least 1, found 0"),
        ({"block_size": 1.5}, "block_size.*found 1.5"),
        ({"num_blocks": 1}, "num_blocks.*at least 2, found 1"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens.*found True"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"dtype": "int8"}, "expected auto, float32, bfloat16, float16, found int8"),
    ],
)
def test_an_impossible_engine_config_names_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**change)


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, {0, 1}),
        ({"mlp_only_layers": [0]}, {1}),
        ({"decoder_sparse_step": 2}, {1}),
        ({"decoder_sparse_step": 3}, set()),
    ],
)
def test_layers_with_experts(change: dict[str, object], sparse: set[int]) -> None:
    assert ModelConfig.from_dict({**LLAMA, **EXPERTS, **change}).mlps.keys() == sparse


def test_both_spellings_of_the_number_of_experts_are_one() -> None:
    hub = {**LLAMA, **EXPERTS}
    mixtral = {**hub, "num_experts": None, "num_local_experts": 4}
    assert ModelConfig.from_dict(mixtral).mlps == ModelConfig.from_dict(hub).mlps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok.*at most num_experts = 4, found 5"),
        ({"num_experts": 0}, "num_experts is impossible.*found 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers is impossible.*found '0'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob.*true or false"),
    ],
)
def test_bad_experts_name_field_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**LLAMA, **EXPERTS, **change})


def test_windows_that_a_family_does_not_have_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"unsupported use_sliding_window.*found sliding_window 8"):
        ModelConfig.from_dict({**LLAMA, **EXPERTS, "use_sliding_window": True, "sliding_window": 8})


GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 8}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": None},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 300.0}}},
    ],
    ids=["rope_local_base_freq", "rope_parameters"],
)
def test_layers_with_a_window_have_a_rotary_base_of_their_own(spelling: dict[str, object]) -> None:
    config = ModelConfig.from_dict({**LLAMA, **GEMMA, **spelling})
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (5e5, 300.0)


def test_what_gemma_does_not_say() -> None:
    config = ModelConfig.from_dict({**LLAMA, **GEMMA})
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta, config.tie_word_embeddings) == (1e6, 1e4, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_pre_attn_scalar": 16}, "query_pre_attn_scalar.*expected head_dim = 8, found 16"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping.*found 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping.*found 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation.*expected gelu_pytorch_tanh, found gelu"),
        ({"rope_parameters": {"full_attention": {"a": {}}}}, "unsupported rope_parameters"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": 3}}, "unsupported rope_parameters"),
    ],
)
def test_what_gemma_has_and_the_engine_has_not_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict({**LLAMA, **GEMMA, **change})
