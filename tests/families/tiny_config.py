"""A small configuration of any architecture: a table of sizes by field name, and few exceptions, each with its reason.

Hidden 64, 2 to 4 layers so that every type of layer occurs, 4 heads and 2 KV heads of 16, vocabulary 256, 8 experts of
which 2 are chosen, sliding windows of 16, 512 positions.
"""

import dataclasses
from itertools import pairwise
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SIZES: dict[str, Any] = {
    # width and depth
    "vocab_size": 256,
    "hidden_size": 64,
    "hidden_size_global": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "dff": 96,
    "dim_ff": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_layers_per_stack": 2,
    "n_layer": 2,
    "n_layers": 2,
    # positions
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "rel_extent": 64,
    "position_bias_num_buckets": 32,
    "position_bias_max_distance": 128,
    "max_seq_len": 512,
    "context_length": 512,
    "original_max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "head_dim": 16,
    "dim_head": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "sliding_window": 16,
    "local_attention": 16,
    "window_size": 16,
    "keep_window_size": 16,
    "floor_scale": 16,
    "log_scaling_n_floor": 16,
    "attention_window_size": 16,
    "sliding_window_size": 16,
    "attention_chunk_size": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "query_pre_attn_scalar": 16,
    # attention with a latent, and with an index of the keys
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 16,  # with few heads many scores are exactly zero, and the choice of keys is a tie
    "index_head_dim": 16,
    "index_topk": 16,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # scans, linear attention
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "block_size": 16,
    "lru_width": 64,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # factors and caps that are off, or hardly felt, by default: on, so that dropping one is a fault
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0,
    "logit_scale": 0.5,
    "logits_mup_width_multiplier": 1.5,
    "routed_scaling_factor": 1.5,
    "route_scale": 1.5,
    "output_logit_soft_cap": 3.0,
    "swiglu_limit": 2.0,
    "mlp_gate_softcap": 2.0,
    "mlp_up_softcap": 3.0,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "dim_model_base": 32,
    "scale_emb": 2,
    "scale_depth": 1.0,
}
MAY_BE_NONE = {
    "head_dim",
    "num_key_value_heads",
    "n_inner",
    "num_experts_per_tok",
    "n_routed_experts",
    "sliding_window_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    # Hybrids whose types of layer are given by indices or periods, or are all alike by default.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0},
    # Every layer has a window: it takes three to reach from token 5 to token 40.
    "ministral": {"layer_types": ["sliding_attention"] * 3, "num_hidden_layers": 3},
    "mistral": {"num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},  # two recurrent blocks, then attention
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_attention_heads_per_layer": [4, 4],
        "num_hidden_layers": 2,
    },
    "minimax_m3_vl_text": {
        "index_n_heads": 2,  # one a KV head
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mellum": {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["sparse", "sparse"]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "llama4_text": {  # with and without rotation, with and without experts
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "num_hidden_layers": 2,
    },
    # The tie between shared blocks is declared by a pattern, which must match a second block.
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    # Sizes that have to agree with each other.
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 128, "mlp_multipliers": [0.8, 1.2], "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7]},
    "xlstm": {"qk_dim_factor": 1.0},  # both are rounded up to 64
    "xlnet": {"d_inner": 96},
    "moshi": {"sliding_window": 512},  # its forward has no window, its cache has: they differ beyond it
    "longcat_flash": {"zero_expert_num": 2, "head_dim": 8, "moe_topk": 3},  # fails with one: it squeezes that away
    "bailing_hybrid": {"head_dim": 16},
    "dots1": {"n_shared_experts": 1},  # None by default, and nothing is built of it
    "dots3_note_text": {
        "head_dim": 24,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 16,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},  # fails with its own defaults
    "blt": {"encoder_hash_byte_group_vocab": 256},
    "zaya": {  # one expert a token is all that it can
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 16,
        "router_hidden_size": 16,
    },
    # Embeddings a layer, and layers that share the keys and values of others.
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": [96, 96, 96, 96],
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 128,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 1,
    },
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small configuration of `model_type`, its text configuration if it has several.

    Raises:
        Exception: what the configuration's class raises, if the sizes do not fit it.
    """
    default = AutoConfig.for_model(model_type).get_text_config()
    fields = (
        sizes_of(type(default)) | parts_of(default) | one_layer_of_each_type(default) | EXCEPTIONS.get(model_type, {})
    )
    return type(default)(**fields)


def sizes_of(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the entries of SIZES that a configuration class has as a field."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    sizes = {name: size for name, size in SIZES.items() if name in defaults}
    sizes = {name: size for name, size in sizes.items() if is_number(defaults[name]) or name in MAY_BE_NONE}
    if "kv_lora_rank" in sizes:  # every head has keys of its own, and their size is the sum of two others
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    return sizes


def parts_of(default: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return small sizes for the configurations inside a configuration (attention, local encoder, ...)."""
    parts = {name: getattr(default, name) for name in default.sub_configs}
    return {name: sizes_of(type(part)) for name, part in parts.items() if sizes_of(type(part))}


def one_layer_of_each_type(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields with an entry a layer, cut to one layer of each distinct row, in their order."""
    num_layers = getattr(default, "num_hidden_layers", None)
    columns = {name: value for name, value in default.to_dict().items() if is_per_layer(value, num_layers)}
    if not columns:
        return {}
    rows = list(dict.fromkeys(zip(*columns.values(), strict=True)))
    rows = [*rows, rows[-1]][: max(2, len(rows))]
    fields = {name: [row[at] for row in rows] for at, name in enumerate(columns)}
    return fields | {"num_hidden_layers": len(rows)}


def is_per_layer(value: Any, num_layers: int | None) -> bool:
    """Tell a list with one entry a layer; a rising list of numbers holds the indices of layers."""
    if not isinstance(value, list) or len(value) != num_layers:
        return False
    return not (is_number(value[0]) and all(a < b for a, b in pairwise(value)))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
