"""The matrix products of a decoder, each computed in the way that is fastest for its weight.

Shapes: T tokens, I inputs, O outputs.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from reference_engine.checkpoint.weights import TOKEN_EMBEDDING
from reference_engine.config import EngineConfig
from reference_engine.fast.huge_pages import collapse_pages
from reference_engine.fast.packing import (
    can_widen,
    copy_for_rows,
    max_few_rows,
    pack,
    packed_linear,
    widen,
    widened_linear,
)
from reference_engine.layers import Linear, Product

__all__ = ["FewRows", "Products", "Widened", "with_row_kernel"]

MIN_ROW_ELEMENTS = 1 << 20
"""Of a weight that is read from a GPU's memory: smaller ones stay in its cache, where torch's product does as well."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """Few rows by a kernel, which reads the plain weight; more of them from a packed copy, or as torch does it."""

    kernel: Product
    max_rows: int
    """The most rows with which the kernel is faster."""
    widened_OI: torch.Tensor | None

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [T, O]."""
        if len(x_TI) <= self.max_rows:
            return self.kernel(x_TI, weight_OI, bias_O)
        if self.widened_OI is not None and len(x_TI) > 1:
            return widened_linear(x_TI, self.widened_OI, bias_O)
        return linear(x_TI, weight_OI, bias_O)


@dataclass(frozen=True, slots=True)
class Widened:
    """One row from the plain weight, several from a second copy that is packed in float32."""

    widened_OI: torch.Tensor

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [T, O]."""
        if len(x_TI) > 1:
            return widened_linear(x_TI, self.widened_OI, bias_O)
        return linear(x_TI, weight_OI, bias_O)


def with_row_kernel(kernel: Product, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    """Return the product on a GPU: one row by a kernel where the weight is large, else as torch does it."""
    if weight_OI.numel() < MIN_ROW_ELEMENTS:
        return Linear(weight_OI, bias_O)
    return Linear(weight_OI, bias_O, FewRows(kernel, 1, None))


@dataclass(slots=True)
class Products:
    """Makes the products of one decoder.

    A compiler cannot read packed weights, nor can a kernel for few rows, beside which only second copies are packed.
    """

    packs: bool
    widens: bool
    kernel: Product | None
    """Computes few rows from a plain weight."""
    max_rows: int
    """See `FewRows.max_rows`."""
    _made: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        kernel: Product | None,
        num_engines: int,
    ) -> Products:
        """Choose the way for weights of this dtype, as the engine's options and the machine's memory allow it."""
        if config.compile_layers:
            kernel = None
        widens = config.widen_weights
        if widens is None:
            products = [weight for name, weight in weights.items() if name != TOKEN_EMBEDDING]
            widens = can_widen(products, num_engines=num_engines, has_few_rows=kernel is not None)
        max_rows = max_few_rows(dtype)
        if max_rows == 1 and not widens:
            kernel = None  # packed weights serve one row, and plain ones several, less well
        return cls(packs=not config.compile_layers, widens=widens, kernel=kernel, max_rows=max_rows)

    def __call__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
        """Return the product; what it keeps of the weight may be another tensor."""
        made = self._make(weight_OI, bias_O)
        copy_OI = getattr(made.product, "widened_OI", None)
        self._made += [made.weight_OI] if copy_OI is None else [made.weight_OI, copy_OI]
        return made

    def finish(self) -> None:
        """Move all that was made to huge pages."""
        collapse_pages(self._made)
        self._made.clear()

    def _make(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
        if self.kernel is not None:
            return Linear(weight_OI, bias_O, FewRows(self.kernel, self.max_rows, copy_for_rows(weight_OI)))
        if not self.packs:
            return Linear(weight_OI, bias_O)
        packed_OI, widened_OI = pack(weight_OI), widen(weight_OI) if self.widens else None
        if packed_OI.is_mkldnn:
            return Linear(packed_OI, bias_O, packed_linear)
        return Linear(weight_OI, bias_O) if widened_OI is None else Linear(weight_OI, bias_O, Widened(widened_OI))
