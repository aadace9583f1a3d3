"""Products with quantised weights by the Triton kernels.

Shapes: T tokens, I inputs, O outputs, B blocks of inputs that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from reference_engine.families.quantised import Float8Product, Int8Product, in_int8, quantised_linear
from reference_engine.layers import Linear

__all__ = ["Float8Kernel", "Int8Kernel", "with_quantised_kernels"]


def with_quantised_kernels(
    operators: Any, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, scale_OB: torch.Tensor, block: int | None
) -> Linear:
    """Return the product with a weight in float8 or int8; see `quantised_linear`."""
    plain = quantised_linear(weight_OI, bias_O, scale_OB, block).product
    if isinstance(plain, Float8Product):
        return Linear(weight_OI, bias_O, Float8Kernel(operators, plain))
    assert isinstance(plain, Int8Product)
    return Linear(weight_OI, bias_O, Int8Kernel(operators, plain))


@dataclass(frozen=True, slots=True)
class Float8Kernel:
    """One row by the kernel, which dequantises on the way; more of them as `Float8Product` does it."""

    operators: Any
    plain: Float8Product

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [T, O]."""
        if len(x_TI) > 1:
            return self.plain(x_TI, weight_OI, bias_O)
        with torch.cuda.device_of(x_TI):  # Triton launches on the current device, which need not be this one
            product: torch.Tensor = self.operators.linear_float8(
                x_TI, weight_OI, bias_O, self.plain.scale_OB, self.plain.block
            )
        return product


@dataclass(frozen=True, slots=True)
class Int8Kernel:
    """As `Int8Product`, but that integers are multiplied as such."""

    operators: Any
    plain: Int8Product

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [T, O]."""
        integers_TI, scale_T1 = in_int8(x_TI)
        with torch.cuda.device_of(x_TI):
            product: torch.Tensor = self.operators.linear_int8(
                integers_TI, scale_T1, weight_OI, self.plain.scale_O1, bias_O, x_TI.dtype
            )
        return product
