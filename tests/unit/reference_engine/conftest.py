"""Tiny seeded checkpoints of every family, written by transformers itself, and their logits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

STORIES = Path(__file__).parents[4] / "shared" / "models" / "stories260k"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 3,
}
FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "qwen2-sliding", "gemma3", "qwen3-moe", "qwen3-next", "deepseek-v3",
)  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, and transformers' model of it in float32."""

    folder: Path
    model: PreTrainedModel

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def logits(self, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[T, V] of one forward over all tokens."""
        model = self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype)
        return model(torch.tensor([token_ids])).logits[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]


def make_qwen3_next(**changes: Any) -> Qwen3NextConfig:
    """Two layers with a gated delta rule around one with gated attention; experts in all but the first layer."""
    sizes = {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "mlp_only_layers": [0], "initializer_range": 0.08,
    }  # fmt: skip
    return Qwen3NextConfig(**SIZES | sizes | changes)


def make_deepseek_v3(**changes: Any) -> DeepseekV3Config:
    """Latent attention whose parts are all of another size, stretched rotary; grouped experts in the second layer."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 1.0, "mscale_all_dim": 0.7}  # fmt: skip
    sizes = {
        "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 28, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
        "v_head_dim": 14, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1, "rope_parameters": rope,
        "routed_scaling_factor": 1.7,
    }  # fmt: skip
    return DeepseekV3Config(**SIZES | sizes | changes)


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(sum(map(ord, family)))
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    elif family == "qwen2-sliding":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))
    elif family == "gemma3":
        layer_types = ["sliding_attention", "full_attention"]
        sizes = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 5, "layer_types": layer_types}
        rope = {"rope_type": "default", "rope_theta": 500.0}
        ropes = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 50.0}}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **sizes, rope_parameters=ropes, pad_token_id=None))
    elif family == "qwen3-moe":
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [0]}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True))
    elif family == "qwen3-next":
        model = Qwen3NextForCausalLM(make_qwen3_next())
    elif family == "deepseek-v3":
        model = DeepseekV3ForCausalLM(make_deepseek_v3())
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
            if family == "qwen3-next" and "linear_attn" not in name:
                parameter.data -= 1  # which multiply by 1 + weight
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products on several threads mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is freed is freed because nothing refers to it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = make_model(family)
        model.save_pretrained(folder)
        made[family] = Checkpoint(folder, model)
    if STORIES.is_dir():
        made["stories260k"] = Checkpoint(STORIES, AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32))
    return made


@pytest.fixture
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    """The checkpoint named by an indirect parameter; qwen3 without one."""
    family = getattr(request, "param", "qwen3")
    if family not in checkpoints:
        pytest.skip(f"{STORIES} is not on this machine")
    return checkpoints[family]
