"""The operations of a decoder layer that know nothing of other tokens.

Each rounds where transformers rounds, so that what is left between the two is the noise of a matrix product.

Shapes: T tokens, I inputs, O outputs, D hidden, F ffn, V vocab; X is any one of these. E experts, C chosen ones of a
token.
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
from reference_engine.checkpoint.experts import ExpertsShape
from reference_engine.checkpoint.model_config import ModelConfig

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Embedding",
    "Expert",
    "Experts",
    "FeedForward",
    "Linear",
    "Product",
    "RMSNorm",
    "ScaledEmbedding",
    "ZeroCentredRMSNorm",
    "build_mlp",
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

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        stacked = batch.adapt(prefix, "mlp.gate_up_proj", x_TD, self.gate_up_proj(x_TD))
        gate_TF, up_TF = stacked.chunk(2, dim=-1)
        batch.tap(prefix, "mlp.gate_proj", gate_TF)
        batch.tap(prefix, "mlp.up_proj", up_TF)
        act_TF = self.activation(gate_TF) * up_TF
        batch.tap(prefix, "mlp.act", act_TF)
        out_TD = batch.adapt(prefix, "mlp.down_proj", act_TF, self.down_proj(act_TF))
        batch.tap(prefix, "mlp.down_proj", out_TD)
        return out_TD


@dataclass(frozen=True, slots=True)
class Expert:
    """One of the experts of a layer."""

    gate_up_proj: Linear
    down_proj: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x_TD: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return [T, D] of the tokens that chose it."""
        gate_TF, up_TF = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        return self.down_proj(activation(gate_TF) * up_TF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sends each token to its best experts, and adds up what they return (Shazeer et al. 2017).

    Experts run one after the other, each over the tokens that chose it; which ones run is known on the host alone.
    """

    router: Linear
    experts: tuple[Expert, ...]
    num_chosen: int
    normalizes_weights: bool
    """Whether the weights of a token's experts add up to one."""
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> torch.Tensor:
        """Return [T, D]; `prefix` starts the names of the taps."""
        weights_TC, chosen_TC = self._route(x_TD, batch, prefix)
        out_TD = torch.zeros_like(x_TD)
        for number in chosen_TC.unique().tolist():  # in order, so that each token's sum has one order
            rows, places = torch.where(chosen_TC == number)
            own = self.experts[number](x_TD[rows], self.activation) * weights_TC[rows, places, None]
            out_TD.index_add_(0, rows, own)
        batch.tap(prefix, "mlp.experts", out_TD)
        return out_TD

    def _route(self, x_TD: torch.Tensor, batch: Batch, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and numbers of each token's experts, both [T, C], the best first."""
        logits_TE = self.router(x_TD)
        batch.tap(prefix, "mlp.gate", logits_TE)
        weights_TC, chosen_TC = logits_TE.softmax(dim=-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
        if self.normalizes_weights:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        weights_TC = weights_TC.to(x_TD.dtype)
        batch.tap(prefix, "mlp.gate.topk", chosen_TC)
        batch.tap(prefix, "mlp.gate.1", weights_TC)
        return weights_TC, chosen_TC


def build_mlp(
    config: ModelConfig,
    layer: int,
    linear: Callable[[str], Linear],
    row_parallel: Callable[[str], Callable[[torch.Tensor], torch.Tensor]],
) -> FeedForward:
    """Assemble what stands in a layer's place of an MLP; `linear` and `row_parallel` take the names of its products."""
    shape, activation = config.mlps.get(layer), ACTIVATIONS[config.family.activation]
    if not isinstance(shape, ExpertsShape):
        return MLP(linear("mlp.gate_up_proj"), row_parallel("mlp.down_proj"), activation)
    names = [f"mlp.experts.{number}" for number in range(shape.num_experts)]
    return Experts(
        router=linear("mlp.gate"),
        experts=tuple(Expert(linear(f"{name}.gate_up_proj"), row_parallel(f"{name}.down_proj")) for name in names),
        num_chosen=shape.num_chosen,
        normalizes_weights=shape.normalizes_weights,
        activation=activation,
    )
