from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import ConfigError, UnsupportedModelError
from reference_engine.rotary import RotaryEmbedding, apply_rotary

from ...closeness import assert_near

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default-1e6": {"rope_type": "default", "rope_theta": 1_000_000},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-short": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 0.5, "original_max_position_embeddings": 40},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
    },
    "llama3-short": {"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3, "original_max_position_embeddings": 30},
}


def make(rope: dict[str, Any], dtype: torch.dtype, head_dim: int = 64) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    hf_config = LlamaConfig(
        vocab_size=8, hidden_size=2 * head_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=131072, rope_parameters=dict(rope), architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config = ModelConfig.from_dict(hf_config.to_dict())
    return RotaryEmbedding(config, torch.device("cpu"), dtype), LlamaRotaryEmbedding(hf_config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_every_bit_is_transformers(rope: str, dtype: torch.dtype, head_dim: int) -> None:
    ours, theirs = make(ROPES[rope], dtype, head_dim)
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    positions = torch.tensor([0, 1, 2, 5, 63, 64, 1000, 8191, 8192, 131071])
    q, k = torch.randn(10, 4, head_dim).to(dtype), torch.randn(10, 2, head_dim).to(dtype)
    cos, sin = theirs(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rotation = ours(positions)
    assert torch.equal(rotation[0][:, 0], cos[0])
    assert torch.equal(rotation[1][:, 0], sin[0])
    assert torch.equal(apply_rotary(q, *rotation), expected_q[0])
    assert torch.equal(apply_rotary(k, *rotation), expected_k[0])


def test_the_result_for_a_position_does_not_depend_on_its_row() -> None:
    ours, _ = make(ROPES["llama3"], torch.float32)
    whole = torch.stack(ours(torch.arange(300)))
    single = torch.cat([torch.stack(ours(torch.tensor([position]))) for position in range(300)], dim=1)
    assert_near(single, whole)


def test_llama3_changes_something() -> None:
    plain, _ = make(ROPES["default"] | {"rope_theta": 100.0}, torch.float32)
    scaled, _ = make(ROPES["llama3-short"], torch.float32)
    assert not torch.equal(plain.inv_freq, scaled.inv_freq)


def test_an_unsupported_type_is_named_with_the_supported_ones() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"rope_type.*expected one of default, linear, llama3, yarn, found dynamic"
    ):
        make({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, torch.float32)


def test_a_missing_parameter_is_named(checkpoint: Any) -> None:
    config = ModelConfig.from_dict(
        {**checkpoint.model.config.to_dict(), "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}
    )
    with pytest.raises(ConfigError, match="low_freq_factor is missing, in rope_parameters of type llama3"):
        RotaryEmbedding(config, torch.device("cpu"), torch.float32)
