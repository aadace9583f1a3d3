"""The name table: which tensor of a HuggingFace checkpoint goes where.

q, k and v are stacked into one matrix, gate and up into another, so that each is one product.

Shapes: D hidden, F ffn, V vocab, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reference_engine.config import ModelConfig

__all__ = ["LM_HEAD", "TOKEN_EMBEDDING", "Placement", "weight_table"]

TOKEN_EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one checkpoint tensor goes."""

    parameter: str
    """The engine's parameter, in which several tensors may be stacked."""
    shape: tuple[int, ...]
    """The checkpoint tensor's own shape."""
    row: int = 0
    """First row in the parameter."""


def weight_table(config: ModelConfig) -> dict[str, Placement]:
    """Map the name of every tensor that a checkpoint must hold to its place.

    `lm_head.weight` is absent where the head is tied to the embedding.
    """
    shape_VD = (config.vocab_size, config.hidden_size)
    table = {TOKEN_EMBEDDING: Placement(TOKEN_EMBEDDING, shape_VD)}
    for layer in range(config.num_hidden_layers):
        table.update(_layer_table(config, f"model.layers.{layer}."))
    table["model.norm.weight"] = Placement("model.norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        table[LM_HEAD] = Placement(LM_HEAD, shape_VD)
    return table


def _layer_table(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Placement]]:
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_q, num_kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", Placement(f"{prefix}{norm}.weight", (hidden,))
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield f"{attention}{norm}.weight", Placement(f"{attention}{norm}.weight", (head_dim,))
    qkv = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
    yield from _stacked(attention, "qkv_proj", qkv, hidden, config.qkv_bias)
    yield from _stacked(attention, "o_proj", {"o_proj": hidden}, num_q, config.o_bias)
    yield from _stacked(mlp, "gate_up_proj", {"gate_proj": ffn, "up_proj": ffn}, hidden, config.mlp_bias)
    yield from _stacked(mlp, "down_proj", {"down_proj": hidden}, ffn, config.mlp_bias)


def _stacked(
    prefix: str, target: str, num_rows: dict[str, int], num_inputs: int, has_bias: bool
) -> Iterator[tuple[str, Placement]]:
    """Stack linear layers, given with their numbers of rows, into `target`."""
    row = 0
    for name, num_outputs in num_rows.items():
        yield f"{prefix}{name}.weight", Placement(f"{prefix}{target}.weight", (num_outputs, num_inputs), row)
        if has_bias:
            yield f"{prefix}{name}.bias", Placement(f"{prefix}{target}.bias", (num_outputs,), row)
        row += num_outputs
