"""Rows of numbers for an operation, made from a seed, and how a program writes them."""

import math
from dataclasses import dataclass

import torch

from harness.base.metrics import rounding_unit, row_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """Normally distributed numbers."""

    shape: tuple[int, ...]
    dtype: str
    level: float
    """Standard deviation."""
    seed: int
    offset: float = 0.0
    """Added to every element."""

    def tensor(self) -> torch.Tensor:
        """Make them."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(*self.shape, generator=generator) * self.level + self.offset
        return drawn.to(getattr(torch, self.dtype))

    def line(self, name: str) -> str:
        """Return the line of a program that makes the same."""
        shape = ", ".join(map(str, self.shape))
        drawn = f"torch.randn({shape}, generator=torch.Generator().manual_seed({self.seed}))"
        drawn += f" * {self.level!r}" if self.level != 1 else ""
        drawn += f" + {self.offset!r}" if self.offset else ""
        return f"{name} = ({drawn}).to(torch.{self.dtype})"


def worst_row(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> tuple[int, float, float] | None:
    """Return index, error and bound in roundings of the row that exceeds its bound the most; None: none does.

    `actual` and `expected` are [rows, ...], the latter float64; roundings are to the dtype of the former. `bound` is
    [rows] float64.
    """
    error = row_metrics(actual, expected).relative_l2 / rounding_unit(actual.dtype)
    error = error.nan_to_num(nan=math.inf)
    excess = torch.where(error <= bound, 0.0, error / bound)
    worst = int(excess.argmax())
    return (worst, float(error[worst]), float(bound[worst])) if excess[worst] else None


def closeness_lines(row: int, bound: float, dtype: torch.dtype) -> list[str]:
    """Return lines that assert that one row of `out` is near that of `expected`."""
    return [
        f"error = (out[{row}].double() - expected[{row}].double()).norm() / expected[{row}].double().norm()",
        f"roundings = error / {rounding_unit(dtype):.4g}",
        'print(f"{roundings:.3g} roundings")',
        f"assert roundings <= {bound:.3g}",
    ]
