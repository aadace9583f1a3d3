"""The parts that a decoder is made of, and those of one of its layers: what the layers of every family are built from.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_engine.attention.backend import AttentionBackend
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.families.gemma3 import ZeroCentredRMSNorm
from reference_engine.families.quantised import QuantisedLinear, quantised_linear
from reference_engine.families.state_cache import StateCache
from reference_engine.layers import ACTIVATIONS, Linear, RMSNorm
from reference_engine.rotary import RotaryEmbedding
from reference_engine.tensor_parallel import TensorParallel

__all__ = ["LayerParts", "Parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Weights and config of a model, and what computes with them."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    """The parameters that `load_weights` returns. Those of matrix products are taken out as they are used, so that what
    `product` makes of one replaces it in memory."""
    backend: AttentionBackend
    parallel: TensorParallel
    rotary: RotaryEmbedding
    local_rotary: RotaryEmbedding | None = None
    """Of the layers with a window, if they have one of their own."""
    states: StateCache | None = None
    """Of recurrent layers."""
    product: Callable[[torch.Tensor, torch.Tensor | None], Linear] = Linear
    """Makes a product of a weight [O, I] and a bias [O]."""
    quantised: QuantisedLinear = quantised_linear
    """Makes a product of a weight that has scales."""

    def norm(self, name: str) -> RMSNorm:
        """Return the norm with this weight, as the family computes it."""
        norm_class = ZeroCentredRMSNorm if self.config.family.has_zero_centred_norms else RMSNorm
        return norm_class(self.weights[name], self.config.rms_norm_eps)

    def linear(self, name: str, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
        """Return the product with a weight, which has this name, and with its scales if it has some."""
        scale_OB = self.weights.pop(f"{name}_scale", None)
        if scale_OB is None:
            return self.product(weight_OI, bias_O)
        block = None if self.config.quantisation is None else self.config.quantisation.block
        return self.quantised(weight_OI, bias_O, scale_OB, None if block is None else block[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The parts of one layer, by their names in it: `self_attn.o_proj`."""

    whole: Parts
    layer: int

    @property
    def prefix(self) -> str:
        """Start of the names of its taps and weights: `model.layers.3.`."""
        return f"model.layers.{self.layer}."

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The family's activation."""
        return ACTIVATIONS[self.whole.config.family.activation]

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight of the layer, which stays where it is."""
        return self.whole.weights[f"{self.prefix}{name}"]

    def take_weight(self, name: str) -> torch.Tensor:
        """Take a weight out, to be replaced by what is made of it."""
        return self.whole.weights.pop(f"{self.prefix}{name}")

    def norm(self, name: str) -> RMSNorm:
        """Return a norm."""
        return self.whole.norm(f"{self.prefix}{name}.weight")

    def linear(self, name: str) -> Linear:
        """Return a matrix product of which this rank has all outputs, or its share of them."""
        weight_name, bias_O = f"{self.prefix}{name}.weight", self.whole.weights.get(f"{self.prefix}{name}.bias")
        return self.whole.linear(weight_name, self.whole.weights.pop(weight_name), bias_O)

    def row_parallel(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a matrix product of which this rank has its share of the inputs."""
        return self.whole.parallel.row_parallel(self.linear(name))
