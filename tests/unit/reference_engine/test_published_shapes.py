"""The name table against transformers' own modules, in the shapes that people run. No weights: the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.weights import weight_table
from reference_engine.rotary import RotaryEmbedding

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
         "max_position_embeddings": 131072, "num_hidden_layers": 28, "use_sliding_window": False}  # fmt: skip
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
         "max_position_embeddings": 40960, "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
         "rope_theta": 1e6, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-7B": (
        {**QWEN2, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
         "num_key_value_heads": 4, "rope_theta": 1e6, "sliding_window": 131072, "max_window_layers": 28,
         "tie_word_embeddings": False}, 7_615_616_512,
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        {**QWEN2, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
         "num_key_value_heads": 2, "rope_theta": 10000, "sliding_window": 4096, "max_window_layers": 21,
         "tie_word_embeddings": False}, 1_777_088_000,
    ),
    "Qwen3-0.6B": (
        {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "max_window_layers": 28, "tie_word_embeddings": True}, 596_049_920,
    ),
    "Qwen3-1.7B": (
        {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
         "max_window_layers": 28, "tie_word_embeddings": True}, 1_720_574_976,
    ),
    "Qwen3-4B": (
        {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
         "max_window_layers": 36, "tie_word_embeddings": True}, 4_022_468_096,
    ),
    "Qwen3-8B": (
        {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
         "max_window_layers": 36, "tie_word_embeddings": False}, 8_190_735_360,
    ),
    "Llama-3.2-1B": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "max_position_embeddings": 131072, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
         "attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0, "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}}, 1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "max_position_embeddings": 32768, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 10000.0,
         "sliding_window": 4096, "tie_word_embeddings": False}, 7_241_732_096,
    ),
    "Gemma-3-1B": (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
         "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "vocab_size": 262144, "hidden_size": 1152,
         "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 10000,
         "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
         "final_logit_softcapping": None, "attention_bias": False}, 999_885_952,
    ),
    "Qwen3-30B-A3B": (
        {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
         "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
         "max_window_layers": 48, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8},
        30_532_122_624,
    ),
    "Qwen3-Next-80B-A3B": (
        {**QWEN3, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
         "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
         "head_dim": 256, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
         "num_experts": 512, "num_experts_per_tok": 10, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
         "rope_theta": 10_000_000, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "linear_value_head_dim": 128},
        79_674_391_296,
    ),
    "DeepSeek-V3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
         "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "vocab_size": 129280, "hidden_size": 7168,
         "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
         "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
         "moe_intermediate_size": 2048, "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_theta": 10000,
         "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
                          "beta_slow": 1, "original_max_position_embeddings": 4096},
         "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "ep_size": 1},
        671_026_404_352,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_name_table_is_the_module_s_parameters(name: str, tmp_path: Path) -> None:
    values, num_parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf_config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    config = ModelConfig.from_folder(tmp_path)
    corrections = [buffer for buffer in model.named_buffers() if buffer[0].endswith("score_correction_bias")]
    stored = [*model.named_parameters(), *corrections]
    expected = dict(chain.from_iterable(in_checkpoint(name, shape) for name, shape in stored))
    assert {name: placement.shape for name, placement in weight_table(config).items()} == expected
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    module = type(model.model.rotary_emb)(hf_config)  # on the CPU: the meta device has no values
    assert torch.equal(inv_freq(config), module.full_attention_inv_freq if config.local_rope else module.inv_freq)
    if config.local_rope is not None:
        assert torch.equal(inv_freq(replace(config, rope=config.local_rope)), module.sliding_attention_inv_freq)


def in_checkpoint(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a checkpoint that transformers makes one parameter of: it stacks those of experts."""
    shape = tuple(parameter.shape)
    if len(shape) != 3 or name.endswith("conv1d.weight"):
        yield name, shape
        return
    prefix, _, product = name.rpartition(".")
    for expert in range(shape[0]):
        parts = ["gate_proj", "up_proj"] if product == "gate_up_proj" else [product]
        for part in parts:
            yield f"{prefix}.{expert}.{part}.weight", (shape[1] // len(parts), shape[2])


def inv_freq(config: ModelConfig) -> torch.Tensor:
    return RotaryEmbedding(config, torch.device("cpu"), torch.float32).inv_freq


@pytest.mark.parametrize("name", PUBLISHED)
def test_stacked_parameters_are_filled_without_gap_or_overlap(name: str) -> None:
    rows: dict[str, list[tuple[int, int]]] = {}
    for placement in weight_table(ModelConfig.from_dict(PUBLISHED[name][0])).values():
        rows.setdefault(placement.parameter, []).append((placement.row, placement.row + placement.shape[0]))
    for spans in rows.values():
        starts, stops = zip(*sorted(spans), strict=True)
        assert starts == (0, *stops[:-1])


def test_only_mistral_and_gemma_slide_here() -> None:
    windows = {name: set(ModelConfig.from_dict(values).layer_windows) for name, (values, _) in PUBLISHED.items()}
    assert windows.pop("Mistral-7B-v0.1") == {4096}
    windows.pop("Gemma-3-1B")
    in_order = ModelConfig.from_dict(PUBLISHED["Gemma-3-1B"][0]).layer_windows
    assert in_order == (((512,) * 5 + (None,)) * 5)[:26]
    assert set().union(*windows.values()) == {None}
