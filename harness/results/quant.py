"""The cost of quantisation for a model: one row a type, and the text that it was measured on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantRow:
    """One type of a model. KL is in nats, from the truth to what is measured, over the rows of the text."""

    name: str
    """Type or file."""
    size_bytes: int
    bits_per_weight: float
    perplexity: float
    """Of the engine on the text."""
    kl_mean: float
    """Of the engine from HF's original."""
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    """Share of the rows at which the engine's likeliest token is the original's."""
    kl_mean_format: float
    """The cost of the format: HF with the dequantised weights from HF's original."""
    kl_mean_arithmetic: float
    """The cost of the arithmetic: the engine from HF with the dequantised weights."""


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
