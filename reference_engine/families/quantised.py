"""Matrix products with quantised weights.

Shapes: T tokens, I inputs, O outputs, B blocks of inputs that share a scale.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from reference_engine.layers import Linear

__all__ = ["Float8Product", "Int8Product", "QuantisedLinear", "dequantised", "in_int8", "quantised_linear"]

QuantisedLinear = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, int | None], Linear]
"""Makes a product of a weight [O, I], a bias, scales [O, B] and the inputs of a block; None: all."""
MAX_ELEMENTS = 1 << 24
"""Of a weight that are dequantised at a time."""


def quantised_linear(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, scale_OB: torch.Tensor, block: int | None
) -> Linear:
    """Return the product with a weight in float8 or int8; each scale is that of `block` inputs, None: of all."""
    if weight_OI.dtype == torch.int8:
        return Linear(weight_OI, bias_O, Int8Product(scale_OB))
    return Linear(weight_OI, bias_O, Float8Product(scale_OB, weight_OI.shape[1] if block is None else block))


def dequantised(weight_OI: torch.Tensor, scale_OB: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight times its scales, of `block` inputs each, rounded once: [O, I] in `dtype`."""
    scale_OI = scale_OB
    if scale_OB.shape[1] > 1:
        scale_OI = scale_OB.repeat_interleave(block, dim=1)[:, : weight_OI.shape[1]]
    return (weight_OI.to(torch.float32) * scale_OI).to(dtype)


@dataclass(frozen=True, slots=True)
class Float8Product:
    """Dequantise some outputs' weights at a time, then torch's product in the dtype of the inputs."""

    scale_OB: torch.Tensor
    block: int
    """Inputs that share a scale; the last block may be narrower."""

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [T, O]."""
        step = max(1, MAX_ELEMENTS // weight_OI.shape[1])
        parts = []
        for outputs in (slice(at, at + step) for at in range(0, len(weight_OI), step)):
            weight = dequantised(weight_OI[outputs], self.scale_OB[outputs], self.block, x_TI.dtype)
            parts.append(linear(x_TI, weight, None if bias_O is None else bias_O[outputs]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True, slots=True)
class Int8Product:
    """Quantise each row of the inputs to int8, by its largest number, and add up integers, which is exact."""

    scale_O1: torch.Tensor

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [T, O]: the integers' sums times both scales in float32, rounded once."""
        integers_TI, scale_T1 = in_int8(x_TI)
        y_TO = _sums(integers_TI, weight_OI).to(torch.float32) * scale_T1 * self.scale_O1[:, 0]
        return (y_TO if bias_O is None else y_TO + bias_O).to(x_TI.dtype)


def _sums(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the sums of products of int8, [T, O], exactly."""
    if x_TI.device.type == "cpu":
        return torch._int_mm(x_TI, weight_OI.T)
    # torch's product of integers wants more rows on a GPU; up to 2^39 products are exact in float64.
    return x_TI.to(torch.float64) @ weight_OI.to(torch.float64).T


def in_int8(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers [T, I] between -127 and 127 as int8, and the scale of each row, [T, 1] float32."""
    x32 = x_TI.to(torch.float32)
    scale_T1 = x32.abs().amax(dim=1, keepdim=True) / 127
    scale_T1 = torch.where(scale_T1 == 0, 1.0, scale_T1)  # a NaN stays one, and makes the whole row NaN
    return (x32 / scale_T1).round().clamp(-127, 127).to(torch.int8), scale_T1
