"""The families of decoders that the engine knows: a table, not a class each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.delta_net import DeltaNetShape, qwen3_next_delta_nets
from reference_engine.checkpoint.experts import deepseek_v3_experts, qwen3_moe_experts, qwen3_next_experts
from reference_engine.checkpoint.latent import LatentShape, deepseek_v3_latent
from reference_engine.checkpoint.placement import Placement

__all__ = ["FAMILIES", "Family", "MLPShape", "Sliding"]


class Sliding(Enum):
    """The layers of a family that may have a sliding window."""

    NEVER = "never"
    ALL_LAYERS = "all layers"
    """All, when config.json has a width."""
    BY_LAYER = "by layer"
    """Those that config.json names."""
    BY_PATTERN = "by pattern"
    """Those that config.json names; where it names none, all but every sixth."""


class MLPShape(Protocol):
    """The form of a layer's MLP, if it is not one gate, one up and one down projection."""

    def tensors(self, prefix: str, hidden_size: int) -> Iterator[tuple[str, Placement]]:
        """Yield the checkpoint's tensors of one layer and their places; `prefix` starts their names."""

    def shard(self, num_ranks: int) -> MLPShape:
        """Return one rank's part.

        Raises:
            ConfigError: something does not divide.
        """


def _none(fields: ConfigFields) -> Mapping[int, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences between families of decoders, beyond the sizes in config.json."""

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
    default_rope_theta: float = 10_000.0
    default_local_rope_theta: float | None = None
    """Rotary base of the layers with a window if they have one of their own; None: that of the others."""
    ties_head_by_default: bool = False
    """Whether the head is the embedding where config.json does not say."""
    sliding: Sliding = Sliding.NEVER
    activation: str = "silu"
    activation_field: str = "hidden_act"
    """The field of config.json that names the activation."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms over the hidden size in each layer: before attention and MLP, or with four also after each."""
    has_zero_centred_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    mlps: Callable[[ConfigFields], Mapping[int, MLPShape]] = _none
    """By layer, what stands in the place of an MLP that is not a plain one."""
    delta_nets: Callable[[ConfigFields], Mapping[int, DeltaNetShape]] = _none
    """By layer, what stands in the place of attention."""
    latent: Callable[[ConfigFields], LatentShape] | None = None
    """What stands in its place in all layers; None: nothing."""
    gates_attention: bool = False
    """Whether what attention returns is multiplied by the sigmoid of a gate, which q_proj computes beside q."""
    default_partial_rotary_factor: float | None = None
    """Share of each head that is rotated where config.json does not say; None: all of it, whatever config.json says."""
    ignored_prefix: str | None = None
    """Start of the names of tensors that are no part of the decoder, as in transformers."""


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
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        default_head_dim=256,
        default_max_position_embeddings=131072,
        default_rope_theta=1_000_000.0,
        default_local_rope_theta=10_000.0,
        ties_head_by_default=True,
        sliding=Sliding.BY_PATTERN,
        activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
        layer_norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        has_zero_centred_norms=True,
        scales_embedding=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        mlps=qwen3_moe_experts,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        qk_norm=True,
        default_head_dim=256,
        has_zero_centred_norms=True,
        mlps=qwen3_next_experts,
        delta_nets=qwen3_next_delta_nets,
        gates_attention=True,
        default_partial_rotary_factor=0.25,
        ignored_prefix="mtp.",
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        default_max_position_embeddings=4096,
        mlps=deepseek_v3_experts,
        latent=deepseek_v3_latent,
        ignored_prefix="model.layers.61.",
    ),
}
