"""Small models of many families with lively weights, as checkpoints on disk: what no embedded checkpoint covers."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

WINDOW = 5
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "axk2": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "index_topk": 3,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "gated_norm_rank": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, **_WINDOWED},
    "gemma2": {**_WINDOWED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_WINDOWED, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "gpt_oss": {**_WINDOWED, **_EXPERTS},
    "llama4_text": {
        **_EXPERTS,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8,
    },
    "mamba": {"state_size": 8},
    "mixtral": _EXPERTS,
    "phi3": {},
    "phimoe": _EXPERTS,
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 64},
    "rwkv": {"attention_hidden_size": 32},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
}
"""Model types and what they need besides the sizes."""
_OWN_SIZES = {
    "gpt2": ("vocab_size",),
    "gptj": ("vocab_size",),
    "mamba": ("vocab_size", "hidden_size", "num_hidden_layers"),
    "rwkv": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
}
"""The sizes that a family knows, where it does not know all of them."""
_SPREADS = {"mamba": 3}
"""How many times HF's own initial weights are enlarged, where the usual factor overflows float16."""


def tiny_model(family: str, **changes: Any) -> Any:
    """Return a model of a family with seeded weights of plausible spread, in float32."""
    known = _OWN_SIZES.get(family, tuple(_SIZES))
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    config = AutoConfig.for_model(family, **(sizes | FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = _from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(_SPREADS.get(family, 6))
            elif "norm" in name or "ln_" in name:  # not all ones: a norm without its weight would look like one with it
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def _from_config(config: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except ValueError:  # a family that has eager attention only
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a model as a checkpoint; return its folder."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder, **options)
    finally:
        logging.set_verbosity(verbosity)
    return folder
