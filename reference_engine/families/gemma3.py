"""Layers of Gemma 3.

Shapes: T tokens, D hidden; X is any one of D and the head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_engine.batch import Batch
from reference_engine.layers import FeedForward, RMSNorm, TokenMixer

__all__ = ["SandwichLayer", "ScaledEmbedding", "ZeroCentredRMSNorm"]


@dataclass(frozen=True, slots=True)
class ZeroCentredRMSNorm(RMSNorm):
    """Gemma's: multiplied by 1 + weight, all in float32, and rounded once."""

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of the same shape; the input is left as it is."""
        x32 = x_TX.to(torch.float32)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight_X.to(torch.float32))).to(x_TX.dtype)


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """Gemma's: the rows of a table times the root of the hidden size, which is rounded to the dtype first."""

    embedding: Callable[[torch.Tensor], torch.Tensor]
    scale: torch.Tensor
    """No dimensions."""

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        return self.embedding(token_ids_T) * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichLayer:
    """Attention, then MLP, each with a norm before it and another one after it (Gemma 3)."""

    prefix: str
    """Start of the names of its taps: `model.layers.3.`."""
    input_layernorm: RMSNorm
    attention: TokenMixer
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    mlp: FeedForward
    post_feedforward_layernorm: RMSNorm

    def __call__(self, x_TD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the residual stream [T, D] after this layer."""
        normed_TD = self.input_layernorm(x_TD)
        batch.tap(self.prefix, "input_layernorm", normed_TD)
        normed_TD = self.post_attention_layernorm(self.attention(normed_TD, rotation, batch, self.prefix))
        batch.tap(self.prefix, "post_attention_layernorm", normed_TD)
        x_TD = x_TD + normed_TD
        batch.tap(self.prefix, "attn_residual", x_TD)
        normed_TD = self.pre_feedforward_layernorm(x_TD)
        batch.tap(self.prefix, "pre_feedforward_layernorm", normed_TD)
        normed_TD = self.post_feedforward_layernorm(self.mlp(normed_TD, batch, self.prefix))
        batch.tap(self.prefix, "post_feedforward_layernorm", normed_TD)
        x_TD = x_TD + normed_TD
        batch.tap(self.prefix, "output", x_TD)
        return x_TD
