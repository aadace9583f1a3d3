"""The cost of quantisation for a model: one row a type, and the text that it was measured on."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The cost of one part of a model in a type, while all other parts are the original's."""

    split: str
    """`layers`, `kinds` (all weights of one name) or `weights`."""
    name: str
    layer: int | None
    """None of a kind, and outside of the layers."""
    num_weights: int
    relative_error: float
    """Norm of what quantising changes in its weights, as a share of their own."""
    kl_mean: float
    """From HF's original, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDivergence:
    """The cost in the rows of one phase, mean KL in nats."""

    phase: str
    """`prefill` or `decode`."""
    num_rows: int
    kl_mean: float
    kl_mean_format: float
    kl_mean_arithmetic: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantRow:
    """One type of a model. KL is in nats, from the truth to what is measured, over the rows of the text."""

    name: str
    """Type or file."""
    size_bytes: int
    bits_per_weight: float
    tensor_types: Mapping[str, float]
    """The types of its tensors, each with its share of their bytes, the largest first."""
    note: str
    """What the name does not say of these tensors; empty where there is nothing to say."""
    perplexity: float | None
    """Of the engine on the text; `ENGINE_FIGURES` are None where the engine is not installed."""
    kl_mean: float | None
    """Of the engine from HF's original."""
    kl_median: float | None
    kl_p99: float | None
    kl_max: float | None
    same_top: float | None
    """Share of the rows at which the engine's likeliest token is the original's."""
    kl_mean_format: float
    """The cost of the format: HF with the dequantised weights from HF's original."""
    kl_mean_arithmetic: float | None
    """The cost of the arithmetic: the engine from HF with the dequantised weights."""
    parts: tuple[PartCost, ...] = ()
    """In the model's order; empty where none was asked for."""
    phases: tuple[PhaseDivergence, ...] = ()
    """Of an engine that computed prompts and single tokens."""


ENGINE_FIGURES = ("perplexity", "kl_mean", "kl_median", "kl_p99", "kl_max", "same_top", "kl_mean_arithmetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantResult:
    """Some types of one model on one text."""

    model: str
    text: str
    """The source of the tokens."""
    num_rows: int
    """Rows at which distributions were compared."""
    perplexity: float
    """Of HF's original on the text."""
    types: tuple[QuantRow, ...]
