"""What an engine declares of its arithmetic: it chooses the conventions that the engine's operations are held to.

What is not declared is found by trial where trial is safe, and the report says so. What changes stored values, a cache
in a coarser dtype or quantised activations, has to be declared: undeclared it is a finding.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Where an engine's arithmetic is not all in its dtype. Nothing here imports torch or pydantic."""

    __pydantic_config__ = {"strict": True, "extra": "forbid"}  # noqa: RUF012 (part of recordings: read strictly)

    weights: tuple[str, ...] = ()
    """Formats of the matrices, as GGUF names them: `F16`, `Q8_0`, `Q4_K`; the judging model holds them dequantised."""
    cache: str | None = None
    """Dtype of the KV cache, as torch names it (`float16`), where it is coarser than the engine's."""
    num_ranks: int | None = None
    """Processes that share each product; None where that is not known, 1 for none."""
