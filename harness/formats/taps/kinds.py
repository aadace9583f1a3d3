"""The kinds of operation, and all that is particular to each: bounds, floors of statistics, words.

This is the one table to change when a kind is added or judged otherwise. The numbers were measured:
docs/how-verdicts-work.md and reports/cpu/noise-floors.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of an operation, as far as the operators that HF's code ran tell it."""

    EMBEDDING = "embedding"
    COPY = "copy"
    """Part of another tap, or all of it, moved and not computed with."""
    NORM = "norm"
    LINEAR = "linear"
    ROTARY = "rotary"
    CACHE = "cache"
    STATE = "state"
    """What a recurrence or a convolution goes on from, as a cache holds it after a position."""
    ATTENTION = "attention"
    ADD = "add"
    ACTIVATION = "activation"
    CHOICE = "choice"
    """Indices that a router chose."""
    OTHER = "other"
    """Anything else: a scan, a block of experts, several operations in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorModel:
    """The roundings in an operation of one kind (harness/judge/compare/bounds.py)."""

    roundings: float
    """Roundings of the whole row to the engine's dtype, the worst case adding up."""
    accumulation: float = 0.0
    """Errors of a float32 sum, in roundings of the accumulator."""
    products: float = 0.0
    """Roundings of the summed products to the engine's dtype (attention's probabilities)."""
    scores: float = 0.0
    """Errors of the attention scores, in roundings of the accumulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """The properties of one kind."""

    error_model: ErrorModel | None
    """Its derived bound; None if the control alone says what rounding may do."""
    least_effect: float = 0.05
    """Smallest gain or trend, in roundings to a 16-bit dtype, that is held against an engine."""
    has_heads: bool = False
    """Whether a row is made of heads, each of which may be off by itself."""
    repeats_by_position: bool = False
    """Whether errors repeat for rows of one position, rather than for rows of one content."""


KINDS: Mapping[Kind, KindTraits] = {
    Kind.EMBEDDING: KindTraits(error_model=ErrorModel(roundings=0)),
    Kind.COPY: KindTraits(error_model=ErrorModel(roundings=0)),
    Kind.NORM: KindTraits(error_model=ErrorModel(roundings=2, accumulation=8)),
    Kind.LINEAR: KindTraits(error_model=ErrorModel(roundings=1, accumulation=25)),
    Kind.ROTARY: KindTraits(
        error_model=ErrorModel(roundings=3),
        has_heads=True,
        repeats_by_position=True,
    ),
    Kind.ADD: KindTraits(error_model=ErrorModel(roundings=1)),
    Kind.ACTIVATION: KindTraits(error_model=ErrorModel(roundings=2, accumulation=4)),
    Kind.ATTENTION: KindTraits(
        error_model=ErrorModel(roundings=1, accumulation=25, products=4, scores=6),
        # Flash kernels round the probabilities and not their sum, which is a gain of up to 0.2 roundings in float16.
        least_effect=0.5,
        has_heads=True,
    ),
    Kind.CACHE: KindTraits(error_model=ErrorModel(roundings=0)),
    Kind.STATE: KindTraits(error_model=None),
    Kind.CHOICE: KindTraits(error_model=None),
    # A linear layer with an adapter is one; the experts of a layer are, and scans.
    Kind.OTHER: KindTraits(error_model=None),
}
