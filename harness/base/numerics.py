"""The arithmetic that an engine declares; it selects the conventions that judge its operations.

Without a declaration, the judge tries conventions where that is safe, and the report says so. An engine must declare
what changes stored values (a cache in a coarser dtype, quantised activations): otherwise the difference is a finding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CACHE_FORMATS = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "IQ4_NL", "int8", "int4", "mxfp4", "nvfp4")
"""Formats of a cache, in addition to the floating-point dtypes of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Arithmetic of an engine that does not follow from its dtype. This module imports neither torch nor pydantic."""

    __pydantic_config__ = {"strict": True, "extra": "forbid"}  # noqa: RUF012 (part of recordings: read strictly)

    weights: tuple[str, ...] = ()
    """Formats of the matrices, as GGUF names them: `F16`, `Q8_0`, `Q4_K`; the judging model holds them dequantised."""
    cache: str | None = None
    """Dtype of the KV cache, as torch names it (`float16`), or its format if it is coarser than the engine's: as ggml
    names it (`Q8_0`), or `mxfp4` or `nvfp4` for E2M1 in blocks of 16, whose scales are powers of two or E4M3."""
    cache_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Fixed scales, by the tap of a cache (`model.layers.0.k_cache`): one, or one for each KV head. What is
    stored is the quotient, in `float8_e4m3fn`, `float8_e5m2`, `int8`, `int4` or `nvfp4`; a cache without an entry has
    none."""
    cache_scale_of: Literal["token", "head"] | None = None
    """The unit with its own dynamic scale: a token with all KV heads, or one head of a token."""
    cache_values: str | None = None
    """The unit of the values if it differs from that of the keys."""
    attention_inputs: Literal["float16", "bfloat16"] | None = None
    """Dtype to which attention rounds the keys and values that it reads, if the cache has a finer dtype."""
    gelu: Literal["float16"] | None = None
    """Dtype to which gelu's argument and value are rounded: ggml reads the tanh form from a table."""
    softplus_by_log: bool = False
    """Whether softplus is log(1 + exp(x)), which loses the digits of small values: the bound of an operation is then
    the error that HF has with this formula."""
    cache_rotations: tuple[int, int] = (0, 0)
    """Size of the Hadamard matrix that rotates heads of keys and of values before quantisation; 0 for none."""
    interleaved_heads: int = 0
    """Size of the heads whose keys are stored as interleaved rotary pairs, which decides what shares a block of a
    quantised cache; 0 if they are stored as halves."""
    rotates_by_request: bool = False
    """Whether rotary frequencies that follow the length (`longrope`, `dynamic`) follow that of the whole request in
    every step, not the length so far."""
    num_ranks: int | None = None
    """Number of processes that share each product; None if unknown."""
