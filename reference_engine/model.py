"""The decoder. `families.build` assembles it from the weights; layers that few families have are in `families`.

Shapes: T tokens, N query heads, K KV heads, H head dim, D hidden, V vocab, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.batch import Batch
from reference_engine.layers import FeedForward, Linear, RMSNorm, Rotation, TokenMixer
from reference_engine.rotary import RotaryEmbedding, apply_rotary

__all__ = ["Attention", "Decoder", "DecoderLayer", "Forward", "Layer"]

Forward = Callable[[Batch], torch.Tensor | None]
"""Computes the logits [R, V] of a batch; None when no row is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """q, k and v of each token, their rotation, and what each token takes from its past."""

    layer: int
    """Number among the layers that keep K and V."""
    head_dim: int
    qkv_sizes: list[int]
    """Width of q, k and v in the stacked product."""
    qkv_proj: Linear
    o_proj: Callable[[torch.Tensor], torch.Tensor]
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    backend: AttentionBackend
    is_gated: bool = False
    """Whether the product has a gate of each head behind its q."""

    def __call__(self, x_TD: torch.Tensor, rotation: Rotation, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]."""
        q_TNH, k_TKH, v_TKH, gate_TNH = self._project(x_TD, batch, prefix)
        q_TNH, k_TKH = apply_rotary(q_TNH, *rotation), apply_rotary(k_TKH, *rotation)
        batch.tap(prefix, "q_rope", q_TNH)
        batch.tap(prefix, "k_rope", k_TKH)
        context = self.backend.attend(self.layer, q_TNH, k_TKH, v_TKH, batch).flatten(1)
        batch.tap(prefix, "attention", context)
        if gate_TNH is not None:
            context = context * gate_TNH.flatten(1).sigmoid()
            batch.tap(prefix, "self_attn.act", context)
        out_TD = batch.adapt(prefix, "self_attn.o_proj", context, self.o_proj(context))
        batch.tap(prefix, "self_attn.o_proj", out_TD)
        return out_TD

    def _project(
        self, x_TD: torch.Tensor, batch: Batch, prefix: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        stacked = batch.adapt(prefix, "self_attn.qkv_proj", x_TD, self.qkv_proj(x_TD))
        q, k, v = torch.split(stacked, self.qkv_sizes, dim=-1)
        batch.tap(prefix, "self_attn.q_proj", q)
        batch.tap(prefix, "self_attn.k_proj", k)
        batch.tap(prefix, "self_attn.v_proj", v)
        q_TNH, k_TKH, v_TKH = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        gate_TNH = None
        if self.is_gated:
            q_TNH, gate_TNH = q_TNH[:, 0::2], q_TNH[:, 1::2]
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
            batch.tap(prefix, "self_attn.q_norm", q_TNH)
            batch.tap(prefix, "self_attn.k_norm", k_TKH)
        return q_TNH, k_TKH, v_TKH, gate_TNH


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Attention, then MLP, each on a normalised copy of the residual stream and added to it."""

    prefix: str
    """Start of the names of its taps: `model.layers.3.`."""
    input_layernorm: RMSNorm
    attention: TokenMixer
    post_attention_layernorm: RMSNorm
    mlp: FeedForward

    def __call__(self, x_TD: torch.Tensor, rotation: Rotation, batch: Batch) -> torch.Tensor:
        """Return the residual stream [T, D] after this layer."""
        normed_TD = self.input_layernorm(x_TD)
        batch.tap(self.prefix, "input_layernorm", normed_TD)
        x_TD = x_TD + self.attention(normed_TD, rotation, batch, self.prefix)
        batch.tap(self.prefix, "attn_residual", x_TD)
        normed_TD = self.post_attention_layernorm(x_TD)
        batch.tap(self.prefix, "post_attention_layernorm", normed_TD)
        x_TD = x_TD + self.mlp(normed_TD, batch, self.prefix)
        batch.tap(self.prefix, "output", x_TD)
        return x_TD


class Layer(Protocol):
    """A decoder layer, compiled or not."""

    def __call__(self, x_TD: torch.Tensor, rotation: Rotation, batch: Batch, /) -> torch.Tensor:
        """Return the residual stream [T, D] after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Tokens in, logits of the sampled rows out."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]
    rotary: RotaryEmbedding
    layers: tuple[Layer, ...]
    norm: RMSNorm
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    local_rotary: RotaryEmbedding | None = None
    """Of the layers with a window if they have one of their own."""
    local_layers: frozenset[int] = frozenset()
    """Numbers of those layers."""

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V], or None when no row is sampled."""
        x_TD = self.embed_tokens(batch.token_ids_T)
        batch.tap("model.", "embed_tokens", x_TD)
        rotation = self.rotary.by_request(batch.positions_T, batch.rope_lens, batch.query_lens)
        local_rotation = rotation if self.local_rotary is None else self.local_rotary(batch.positions_T)
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, local_rotation if index in self.local_layers else rotation, batch)
        x_TD = self.norm(x_TD)
        batch.tap("model.", "norm", x_TD)
        return self.logits(x_TD, batch)

    def logits(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V] of normalised rows [T, D], or None when no row is sampled."""
        if not batch.sampled_rows:
            return None
        if batch.sampled_rows_ is not None:
            x_TD = x_TD.index_select(0, batch.sampled_rows_)
        logits_RV = self.lm_head(x_TD)
        batch.tap("", "lm_head", logits_RV)
        return logits_RV
