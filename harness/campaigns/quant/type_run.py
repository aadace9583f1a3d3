"""A model in one type: how large it is, and what it says."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRun:
    """A type's size, and the distributions of which its costs are the distances: each [tokens, vocabulary]."""

    name: str
    size_bytes: int
    bits_per_weight: float
    dequantised: list[torch.Tensor]
    """Of HF with the dequantised weights."""
    engine: list[torch.Tensor]
    """Of the engine that the type is for."""
