"""The adapter of single operations: every method is optional, and the suites say which are missing.

`Rows` are the numbers of an operation's input, made from a seed, and how a program writes them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from harness.base.metrics import rounding_unit, row_metrics
from harness.properties.core.falsify import Target

OPTIONAL = {
    "rotary": "rotary(x_TNH, positions_T, theta) -> x_TNH: default frequencies theta^(-2i/H), element i with i + H/2",
    "rotary_interleaved": "rotary_interleaved(x_TNH, positions_T, theta) -> x_TNH: element 2i with 2i + 1",
    "rms_norm": "rms_norm(x_TX, weight_X, eps) -> x_TX",
    "layer_norm": "layer_norm(x_TX, weight_X, bias_X, eps) -> x_TX",
    "sample": "sample(logits_RV, *, temperatures, top_ks, top_ps, min_ps, seeds) -> [token]: a list of R each; "
    "temperature 0, top-k 0, top-p 1 and min-p 0 switch off; equal seeds draw equally",
    "encode": "encode(text) -> [token]",
    "decode": "decode([token]) -> text, special ones left out",
    "detokenize": "detokenize([token]) -> [piece]: as text is streamed",
    "load": "load(folder) -> {name: tensor}: the weights of the checkpoint in a folder",
    "num_generated": "num_generated(folder, [token]) -> how many of these tokens a request gets, if the model of the "
    "checkpoint in a folder chooses them one after another",
}
"""By method."""

ATTRIBUTES = {
    "dtypes": 'names of dtypes, by default ("float32", "bfloat16", "float16")',
    "alphabet": "characters that the tokenizer can write; any, if it says nothing",
    "checkpoint": "folder with a checkpoint that `load` and `num_generated` can read, in one file model.safetensors",
    "load_errors": "tuple of the exceptions with which `load` refuses a damaged file, by default (ValueError, OSError)",
}
"""Attributes that an adapter may declare."""


class OpsUnderTest(Target):
    """The object that `--ops` names."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, "ops")
        self.dtypes = tuple(self.declares("dtypes", ("float32", "bfloat16", "float16")))


def not_checked(named: Any) -> list[str]:
    """Name what an adapter does not offer."""
    target = OpsUnderTest(named)
    lines = [f"ops: no {signature}" for method, signature in OPTIONAL.items() if not target.offers(method)]
    if target.declares("checkpoint") is None:
        lines += [
            f"ops: {method}, for want of checkpoint ({ATTRIBUTES['checkpoint']})"
            for method in ("load", "num_generated")
            if target.offers(method)
        ]
    return [
        *lines,
        "ops: norms of more than 1,000 elements, rotary positions past 6,000, heads of more than 128, theta above 1e7, "
        "top-k above 3, temperatures above 2, seeds past 2**31",
    ]


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
