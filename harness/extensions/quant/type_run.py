"""A model in one type: how large it is, what its tensors are, and what it says."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRun:
    """A type's size, and the distributions of which its costs are the distances: each [tokens, vocabulary]."""

    name: str
    size_bytes: int
    bits_per_weight: float
    tensor_types: Mapping[str, float]
    """See `shares`."""
    note: str = ""
    exact: HFModel
    """HF with the dequantised weights."""
    dequantised: list[torch.Tensor]
    """Of that."""
    engine: list[torch.Tensor] | None
    """Of the engine that the type is for; None: it is not installed."""
    prompt_lengths: Sequence[int] = ()
    """Tokens of each sequence that the engine computed as a prompt, where the rest came token by token."""


def shares(tensors: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Return each type's share of all bytes, the largest first, from the types and bytes of tensors."""
    num_bytes: Counter[str] = Counter()
    for name, size in tensors:
        num_bytes[name] += size
    return {name: size / max(1, num_bytes.total()) for name, size in num_bytes.most_common()}
