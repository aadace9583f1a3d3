"""A way to get an operation wrong, and the numbers that would come of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from harness.results.check import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A mistake in place of the operation, and the values that it would have given."""

    cause: str
    """The mistake, in the words of the report: `rotary over neighbouring pairs`."""
    output: torch.Tensor
    """[rows, width] float64, what the wrong rows would be."""
    detail: str = ""
    """Further facts under it: a fitted value, a list of rows."""
    freedom: int = 0
    """Numbers that were fitted, over all rows together: each costs likelihood, and needs rows that support it."""
    allowance: float = 2.0
    """Times a row's own bound that its error may still be under it: under a cause other roundings may be made than in
    the right operation. What only describes an error, by an average over the rows for one, leaves what it does not
    describe, and has room for rounding alone."""
    is_cause: bool = True
    """Whether it may be asserted; False for what only says what was seen: a scale or a place that fits each row by
    itself, content that nothing recorded has."""
    is_vague: bool = False
    """Whether it only points elsewhere: what fits as well and says more comes first."""
    is_fallback: bool = False
    """Whether it says where and not what: it is asserted where no other cause fits."""
    unknown: torch.Tensor | None = None
    """[rows] bool: rows that would have read memory nobody wrote, so that `output` cannot be known there."""
    provenance: Callable[[], Provenance | None] | None = None
    """Traces one wrong place of the KV cache, where the cause lies in one."""


def hypotheses(outputs: Mapping[str, torch.Tensor]) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each cause with what it gives, [rows, width] float64, and nothing fitted."""
    for cause, output in outputs.items():
        yield Hypothesis(cause=cause, output=output)
