"""The operations of a decoder layer that know nothing of other tokens.

Each rounds where transformers rounds, so that what is left between the two is the noise of a matrix product.

Shapes: T tokens, I inputs, O outputs, D hidden, F ffn, V vocab, H head dim; X is any one of these.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.nn.functional import embedding, gelu, linear, silu

from reference_engine.batch import Batch

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Embedding",
    "FeedForward",
    "Linear",
    "Product",
    "RMSNorm",
    "Rotation",
    "TokenMixer",
]

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
"""By the name in config.json."""


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From x [T, I], a weight [O, I] and a bias [O], x W^T + bias: [T, O]."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product, with a bias where the family has one."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None
    product: Product = linear
    """Computes it; another one than torch's may want the weight in an order of its own."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return [T, O]."""
        return self.product(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True)
class Embedding:
    """One row of the table for each token."""

    weight_VD: torch.Tensor

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        return embedding(token_ids_T, self.weight_VD)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Scale to unit root mean square over the last dimension (Zhang and Sennrich 2019, equation 4).

    Statistics are taken in float32; the result is rounded to the dtype, multiplied by the weight, and rounded again.
    """

    weight_X: torch.Tensor
    eps: float

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of the same shape; the input is left as it is."""
        x32 = x_TX.to(torch.float32)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight_X * normed.to(x_TX.dtype)


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token, both [T, 1, H]."""


class TokenMixer(Protocol):
    """The part of a layer that lets a token see those before it."""

    def __call__(self, x_TD: torch.Tensor, rotation: Rotation, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""


class FeedForward(Protocol):
    """The part of a layer that treats each token by itself."""

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x)), gate and up in one matrix product (Shazeer 2020, SwiGLU)."""

    gate_up_proj: Linear
    down_proj: Callable[[torch.Tensor], torch.Tensor]
    activation: Callable[[torch.Tensor], torch.Tensor] = silu
    name: str = "mlp"
    """Name of its taps and products."""

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        name = self.name
        stacked = batch.adapt(prefix, f"{name}.gate_up_proj", x_TD, self.gate_up_proj(x_TD))
        gate_TF, up_TF = stacked.chunk(2, dim=-1)
        batch.tap(prefix, f"{name}.gate_proj", gate_TF)
        batch.tap(prefix, f"{name}.up_proj", up_TF)
        act_TF = self.activation(gate_TF) * up_TF
        batch.tap(prefix, f"{name}.act", act_TF)
        out_TD = batch.adapt(prefix, f"{name}.down_proj", act_TF, self.down_proj(act_TF))
        batch.tap(prefix, f"{name}.down_proj", out_TD)
        return out_TD
