"""The families of decoders that the engine knows: a table, not a class each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

__all__ = ["FAMILIES", "Family", "Sliding"]


class Sliding(Enum):
    """Which layers of a family may have a sliding window."""

    NEVER = "never"
    ALL_LAYERS = "all layers"
    """All, when config.json has a width."""
    BY_LAYER = "by layer"
    """Those that config.json names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells one family of decoders from the next, beyond the sizes in config.json."""

    architecture: str
    qkv_bias: bool | None = None
    """Bias on q, k and v; None: config.json's `attention_bias` says."""
    o_bias: bool | None = None
    """Bias on the output projection; None likewise."""
    has_mlp_bias: bool = False
    """Whether config.json's `mlp_bias` is honoured."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before the rotary embedding."""
    default_head_dim: int | None = None
    """head_dim where config.json has none; None: hidden_size / num_attention_heads."""
    default_max_position_embeddings: int = 32768
    sliding: Sliding = Sliding.NEVER


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", has_mlp_bias=True, default_max_position_embeddings=2048),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, o_bias=False, sliding=Sliding.BY_LAYER),
    "qwen3": Family(architecture="Qwen3ForCausalLM", qk_norm=True, default_head_dim=128, sliding=Sliding.BY_LAYER),
    "mistral": Family(
        architecture="MistralForCausalLM",
        qkv_bias=False,
        o_bias=False,
        default_max_position_embeddings=131072,
        sliding=Sliding.ALL_LAYERS,
    ),
}
