"""Multi-head latent attention (DeepSeek-V3).

Keys and values of all heads are products of one latent. The cache holds only the latent, and the rotated part of the
key that all heads share. A score q (W c) is (q W) c: with W put on the query, the latent c itself is the key. It is the
value, too, if the values' product is made of the context. So attention has one KV head, whose values are the first part
of its keys, in prefill and in decode (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2).

Shapes: T tokens, D hidden, N heads, L latent, P plain and R rotated part of a head, H value head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.batch import Batch
from reference_engine.checkpoint.latent import LatentShape
from reference_engine.families.parts import LayerParts
from reference_engine.layers import Linear, RMSNorm, Rotation
from reference_engine.rotary import apply_rotary

__all__ = ["LatentAttention", "build_latent_attention"]

_NORM_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention over latents, which are keys and values at once."""

    layer: int
    """Number among the layers that keep latents."""
    shape: LatentShape
    queries: Queries
    kv_a_proj: Linear
    kv_a_layernorm: RMSNorm
    key_weight_NPL: torch.Tensor
    """Makes the plain part of each head's key of a latent."""
    value_weight_NHL: torch.Tensor
    """Makes each head's value of a latent."""
    o_proj: Linear
    backend: AttentionBackend

    def __call__(self, x_TD: torch.Tensor, rotation: Rotation, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        shape = self.shape
        q_TNP, q_TNR = self.queries(x_TD, batch, prefix).split([shape.plain_dim, shape.rotary_dim], dim=-1)
        compressed = self.kv_a_proj(x_TD)
        batch.tap(prefix, "self_attn.kv_a_proj_with_mqa", compressed)
        latent_TL, k_TR = compressed.split([shape.rank, shape.rotary_dim], dim=-1)
        latent_TL = self.kv_a_layernorm(latent_TL)
        batch.tap(prefix, "self_attn.kv_a_layernorm", latent_TL)
        q_TNR, k_T1R = self._rotate(q_TNR, rotation), self._rotate(k_TR[:, None], rotation)
        batch.tap(prefix, "q_rope", torch.cat([q_TNP, q_TNR], dim=-1))
        batch.tap(prefix, "k_rope", k_T1R)
        context_TNH = self._attend(q_TNP, q_TNR, latent_TL[:, None], k_T1R, batch)
        batch.tap(prefix, "attention", context_TNH)
        out_TD = self.o_proj(context_TNH.flatten(1))
        batch.tap(prefix, "self_attn.o_proj", out_TD)
        return out_TD

    def _rotate(self, x_TNR: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate; where neighbours are rotated together, they come to lie half a head apart, as in transformers."""
        if self.shape.is_interleaved:
            x_TNR = x_TNR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x_TNR, *rotation)

    def _attend(
        self, q_TNP: torch.Tensor, q_TNR: torch.Tensor, latent_T1L: torch.Tensor, k_T1R: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return the context [T, N, H]."""
        q_TNL = torch.einsum("tnp,npl->tnl", q_TNP, self.key_weight_NPL)
        q, k = torch.cat([q_TNL, q_TNR], dim=-1), torch.cat([latent_T1L, k_T1R], dim=-1)
        context_TNL = self.backend.attend(self.layer, q, k, latent_T1L, batch)
        context_TNH: torch.Tensor = torch.einsum("tnl,nhl->tnh", context_TNL, self.value_weight_NHL)
        return context_TNH


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """The queries of all heads, from the hidden state or from a latent of their own."""

    num_heads: int
    q_a_proj: Linear | None
    q_a_layernorm: RMSNorm | None
    q_proj: Linear

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, N, P + R], not rotated; `prefix` starts the names of the taps."""
        if self.q_a_proj is None or self.q_a_layernorm is None:
            q = self.q_proj(x_TD)
            batch.tap(prefix, "self_attn.q_proj", q)
        else:
            compressed = self.q_a_proj(x_TD)
            batch.tap(prefix, "self_attn.q_a_proj", compressed)
            normed = self.q_a_layernorm(compressed)
            batch.tap(prefix, "self_attn.q_a_layernorm", normed)
            q = self.q_proj(normed)
            batch.tap(prefix, "self_attn.q_b_proj", q)
        q_TNX: torch.Tensor = q.unflatten(-1, (self.num_heads, -1))
        return q_TNX


def build_latent_attention(shape: LatentShape, parts: LayerParts) -> LatentAttention:
    """Assemble the attention of a layer."""
    expand_NXL = parts.take_weight("self_attn.kv_b_proj.weight").unflatten(0, (shape.num_heads, -1))
    key_weight_NPL, value_weight_NHL = expand_NXL.split([shape.plain_dim, shape.value_dim], dim=1)
    has_latent = shape.query_rank is not None

    def norm(name: str) -> RMSNorm:
        return RMSNorm(parts.weight(f"self_attn.{name}.weight"), _NORM_EPS)

    return LatentAttention(
        layer=parts.layer,
        shape=shape,
        queries=Queries(
            num_heads=shape.num_heads,
            q_a_proj=parts.linear("self_attn.q_a_proj") if has_latent else None,
            q_a_layernorm=norm("q_a_layernorm") if has_latent else None,
            q_proj=parts.linear("self_attn.q_b_proj" if has_latent else "self_attn.q_proj"),
        ),
        kv_a_proj=parts.linear("self_attn.kv_a_proj_with_mqa"),
        kv_a_layernorm=norm("kv_a_layernorm"),
        key_weight_NPL=key_weight_NPL,
        value_weight_NHL=value_weight_NHL,
        o_proj=parts.linear("self_attn.o_proj"),
        backend=parts.whole.backend,
    )
