"""The name table: which tensor of a HuggingFace checkpoint goes where.

q, k and v are stacked into one matrix, gate and up into another, so that each is one product.

Shapes: D hidden, F ffn, V vocab, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.placement import Placement, stacked

__all__ = ["LM_HEAD", "TOKEN_EMBEDDING", "Placement", "weight_table"]

TOKEN_EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def weight_table(config: ModelConfig) -> dict[str, Placement]:
    """Map the name of every tensor that a checkpoint must hold to its place.

    `lm_head.weight` is absent where the head is tied to the embedding.
    """
    shape_VD = (config.vocab_size, config.hidden_size)
    table = {TOKEN_EMBEDDING: Placement(TOKEN_EMBEDDING, shape_VD)}
    for layer in range(config.num_hidden_layers):
        table.update(_layer_table(config, layer))
    table["model.norm.weight"] = Placement("model.norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        table[LM_HEAD] = Placement(LM_HEAD, shape_VD)
    return table


def _layer_table(config: ModelConfig, layer: int) -> Iterator[tuple[str, Placement]]:
    hidden, prefix = config.hidden_size, f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", config.mlps.get(layer)
    for norm in config.family.layer_norms:
        yield f"{prefix}{norm}.weight", Placement(f"{prefix}{norm}.weight", (hidden,))
    mixer = config.delta_nets.get(layer) or config.latent
    yield from _attention(config, attention) if mixer is None else mixer.tensors(prefix, hidden)
    yield from _dense_mlp(config, prefix + "mlp.") if mlp is None else mlp.tensors(prefix + "mlp.", hidden)


def _attention(config: ModelConfig, attention: str) -> Iterator[tuple[str, Placement]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    num_q, num_kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield f"{attention}{norm}.weight", Placement(f"{attention}{norm}.weight", (head_dim,))
    qkv = {"q_proj": num_q * (1 + config.family.gates_attention), "k_proj": num_kv, "v_proj": num_kv}
    yield from stacked(attention, "qkv_proj", qkv, hidden, config.qkv_bias)
    yield from stacked(attention, "o_proj", {"o_proj": hidden}, num_q, config.o_bias)


def _dense_mlp(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Placement]]:
    hidden, ffn, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    yield from stacked(prefix, "gate_up_proj", {"gate_proj": ffn, "up_proj": ffn}, hidden, has_bias)
    yield from stacked(prefix, "down_proj", {"down_proj": hidden}, ffn, has_bias)
