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


def factors(head_dim: int) -> dict[str, Any]:
    """LongRoPE's two lists, one factor for each pair."""
    return {
        "short_factor": [1.0 + 0.1 * pair for pair in range(head_dim // 2)],
        "long_factor": [2.0 + 1.37 * pair for pair in range(head_dim // 2)],
    }


LENGTH_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic-odd": {"rope_type": "dynamic", "rope_theta": 10000, "factor": 1.1, "original_max_position_embeddings": 5},
    "dynamic-integers": {"rope_type": "dynamic", "rope_theta": 1_000_000, "factor": 3},
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    "longrope-factor": {"rope_type": "longrope", "rope_theta": 1e6, "factor": 8.0},
    "longrope-attention": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 0.5, "attention_factor": 1.3},
    "longrope-shorter": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 0.5},
}


def make(
    rope: dict[str, Any], dtype: torch.dtype, head_dim: int = 64, max_position_embeddings: int = 131072
) -> tuple[RotaryEmbedding, LlamaRotaryEmbedding]:
    hf_config = LlamaConfig(
        vocab_size=8, hidden_size=2 * head_dim, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=max_position_embeddings, rope_parameters=dict(rope), architectures=["LlamaForCausalLM"],
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


@pytest.mark.parametrize("rope", LENGTH_ROPES)
@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_every_bit_is_transformers_for_a_request_of_any_length(rope: str, head_dim: int) -> None:
    """A request's rows are rotated as by one forward over all of its tokens, whatever stands beside it."""
    parameters = LENGTH_ROPES[rope] | (factors(head_dim) if rope.startswith("longrope") else {})
    ours, theirs = make(parameters, torch.bfloat16, head_dim, 64)
    lengths, seen = [*range(1, 20), 63, 64, 65, 66, 100, 127, 128, 129, 1000, 131072], set()
    for length in lengths:
        rope_len = ours._rope.rope_len(length)
        lens = [rope_len, ours._rope.rope_len(10**6)]
        theirs = type(theirs)(theirs.config)  # which keeps the frequencies of the longest request so far
        cos, sin = theirs(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[0, 1, length - 1]]))
        ours_cos, ours_sin = ours.by_request(torch.tensor([0, 1, length - 1, 5]), lens, [3, 1])
        assert torch.equal(ours_cos[:3, 0], cos[0])
        assert torch.equal(ours_sin[:3, 0], sin[0])
        assert ours.scale == theirs.attention_scaling
        assert torch.equal(ours._inv_freq(rope_len), theirs.inv_freq)
        seen.add(rope_len)
    assert len(seen) == (2 if rope.startswith("longrope") else 9)


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
        UnsupportedModelError,
        match=r"rope_type.*expected one of default, linear, llama3, yarn, dynamic, longrope, found su",
    ):
        make({"rope_type": "su", "rope_theta": 1e4, "factor": 2.0}, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"long_factor": [1.0] * 31}, "long_factor is impossible.*expected a list of 32 numbers above 0"),
        ({"long_factor": [1.0] * 31 + ["1"]}, "long_factor is impossible.*expected a number above 0, found '1'"),
        ({"short_factor": None}, "short_factor is missing"),
    ],
)
def test_factors_are_read_before_a_request_needs_them(change: dict[str, Any], message: str) -> None:
    rope = {**LENGTH_ROPES["longrope"], **factors(64), **change}
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 128, "intermediate_size": 8}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=message):
        RotaryEmbedding(
            ModelConfig.from_dict({**config, **sizes, "rope_parameters": rope}), torch.device("cpu"), torch.float32
        )


def test_a_missing_parameter_is_named(checkpoint: Any) -> None:
    config = ModelConfig.from_dict(
        {**checkpoint.model.config.to_dict(), "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}
    )
    with pytest.raises(ConfigError, match="low_freq_factor is missing, in rope_parameters of type llama3"):
        RotaryEmbedding(config, torch.device("cpu"), torch.float32)
