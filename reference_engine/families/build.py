"""Assembling the decoder of a checkpoint: its config says which layers of which family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from reference_engine.checkpoint.experts import ExpertsShape
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.weights import LM_HEAD, TOKEN_EMBEDDING
from reference_engine.families.experts import build_experts
from reference_engine.families.gemma3 import SandwichLayer, ScaledEmbedding
from reference_engine.families.latent_attention import build_latent_attention
from reference_engine.families.parts import LayerParts, Parts
from reference_engine.families.qwen3_next import build_delta_net
from reference_engine.layers import MLP, FeedForward, TokenMixer
from reference_engine.model import Attention, Decoder, DecoderLayer, Layer
from reference_engine.rotary import RotaryEmbedding

__all__ = ["build_decoder", "build_layer", "open_rotaries"]


def build_decoder(parts: Parts) -> Decoder:
    """Assemble the decoder; this takes the weights of matrix products out of `parts.weights`."""
    config, weights = parts.config, parts.weights
    head = parts.parallel.head(parts.linear(LM_HEAD, weights[LM_HEAD], None))
    return Decoder(
        embed_tokens=_build_embedding(parts),
        rotary=parts.rotary,
        layers=tuple(build_layer(LayerParts(whole=parts, layer=i)) for i in range(config.num_hidden_layers)),
        norm=parts.norm("model.norm.weight"),
        lm_head=head,
        local_rotary=parts.local_rotary,
        local_layers=frozenset(i for i, window in enumerate(config.layer_windows) if window is not None),
    )


def build_layer(parts: LayerParts) -> Layer:
    """Assemble one layer: a token mixer, a feed-forward part, and the norms around them."""
    family = parts.whole.config.family
    layer_class = DecoderLayer if len(family.layer_norms) == 2 else SandwichLayer
    return layer_class(
        prefix=parts.prefix,
        attention=_build_mixer(parts),
        mlp=_build_feed_forward(parts),
        **{name: parts.norm(name) for name in family.layer_norms},
    )


def open_rotaries(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[RotaryEmbedding, RotaryEmbedding | None]:
    """Return what rotates the layers, and what rotates those with a window if that is another."""
    rotary = RotaryEmbedding(config, device, dtype)
    if config.local_rope is None:
        return rotary, None
    return rotary, RotaryEmbedding(replace(config, rope=config.local_rope), device, dtype)


def _build_embedding(parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    table_VD = parts.weights[TOKEN_EMBEDDING]
    embedding = parts.parallel.embedding(table_VD)
    if not parts.config.family.scales_embedding:
        return embedding
    return ScaledEmbedding(embedding, torch.tensor(parts.config.hidden_size**0.5).to(table_VD))


def _build_mixer(parts: LayerParts) -> TokenMixer:
    config = parts.whole.config
    if parts.layer in config.delta_nets:
        return build_delta_net(parts)
    if config.latent is not None:
        return build_latent_attention(config.latent, parts)
    num_q, num_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    is_gated = config.family.gates_attention
    return Attention(
        layer=config.attention_layers.index(parts.layer),
        head_dim=config.head_dim,
        qkv_sizes=[num_q * (1 + is_gated), num_kv, num_kv],
        qkv_proj=parts.linear("self_attn.qkv_proj"),
        o_proj=parts.row_parallel("self_attn.o_proj"),
        q_norm=parts.norm("self_attn.q_norm") if config.qk_norm else None,
        k_norm=parts.norm("self_attn.k_norm") if config.qk_norm else None,
        backend=parts.whole.backend,
        is_gated=is_gated,
    )


def _build_feed_forward(parts: LayerParts) -> FeedForward:
    shape = parts.whole.config.mlps.get(parts.layer)
    if isinstance(shape, ExpertsShape):
        return build_experts(shape, parts)
    return MLP(parts.linear("mlp.gate_up_proj"), parts.row_parallel("mlp.down_proj"), parts.activation)
