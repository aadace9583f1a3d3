"""An entry of the registry of conventions, and the rows that it looks at.

`R` rows, `W` elements of a row, `B` requests, `T` tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from harness.base.numerics import Numerics
from harness.formats.taps import ErrorModel, Kind, Operation
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall

HALF = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectRows:
    """Rows of one operation, some of which are out of bounds."""

    hf: HFModel
    """The operation's weights are in it."""
    operation: Operation
    dtype: torch.dtype
    """The dtype of the operation's tensors: the unit in which it is judged."""
    actual: torch.Tensor
    """[R, W] as the engine recorded them."""
    expected: torch.Tensor
    """[R, W] the truth's."""
    rows: torch.Tensor
    """[R] int64: indices into the batch, request times T plus position; for attention."""
    positions: torch.Tensor
    """[R] int64: of rotary in a layer that predicts further tokens, positions of the tokens that it looks ahead to."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    """[R, ...] each, of an operation that works row by row; empty for attention."""
    call: AttentionCall | None = None
    """Of attention."""
    recorded: Callable[[str], torch.Tensor | None] = lambda _tap: None
    """Returns another tap at the same rows, [R, ...]; None if it was not recorded at all of them."""
    declared: Numerics = field(default_factory=Numerics)
    """The engine's declaration of its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """One legitimate order of rounding, applied to the rows at hand."""

    name: str
    """The name in the report."""
    model: ErrorModel
    """The error model of the rounding that remains."""
    expected: Callable[[], torch.Tensor]
    """Computes what the rows should be: [R, W] float64."""
    allowance: torch.Tensor | None = None
    """[R] float64: roundings that are allowed in addition to those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One entry of the registry."""

    name: str
    """The order of rounding, for the documentation."""
    kinds: tuple[Kind, ...]
    """Operations that it may apply to."""
    alternatives: Callable[[SuspectRows], Iterator[Rounding]]
    """Yields the alternatives that apply to the rows; none if the convention does not apply."""
