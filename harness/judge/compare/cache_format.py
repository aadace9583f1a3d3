"""The format of a KV cache: another dtype, or blocks of integers with a scale.

`R` rows, `W` elements of a row.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from harness.base.numerics import Numerics
from harness.judge.compare.cache_blocks import FORMATS, Stored, quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """The format of keys, or of values."""

    name: str
    """A dtype of torch's, or one of `FORMATS`."""
    interleaved_heads: int = 0
    """See `Numerics`."""
    rotation: int = 0
    """Size of the Hadamard matrix that turns parts of heads."""

    @classmethod
    def declared(cls, numerics: Numerics, part: Literal["k", "v"]) -> "CacheFormat | None":
        """Return the declared format of keys or of values; None if none is declared."""
        is_key = part == "k"
        name = numerics.cache if is_key or numerics.cache_values is None else numerics.cache_values
        if name is None:
            return None
        rotation = numerics.cache_rotations[0 if is_key else 1]
        return cls(name=name, interleaved_heads=numerics.interleaved_heads if is_key else 0, rotation=rotation)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None for a format of blocks, and for what is neither."""
        dtype = getattr(torch, self.name, None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

    @property
    def is_known(self) -> bool:
        """Whether values can be rounded to it."""
        return self.dtype is not None or self.name in FORMATS

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Put heads [..., W] into the order and the basis of the cache: scalar products of heads stay the same."""
        if self.interleaved_heads:
            x = x.unflatten(-1, (-1, 2, self.interleaved_heads // 2)).transpose(-1, -2).flatten(-3)
        return _rotated(x, self.rotation)

    def unturned(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `turned`; a Hadamard matrix is its own inverse."""
        x = _rotated(x, self.rotation)
        if self.interleaved_heads:
            x = x.unflatten(-1, (-1, self.interleaved_heads // 2, 2)).transpose(-1, -2).flatten(-3)
        return x

    def stored(self, x: torch.Tensor) -> Stored:
        """Return what the cache holds of keys or values [..., W]."""
        turned = self.turned(x)
        if self.dtype is not None:
            values = turned.to(self.dtype).to(torch.float64)
            return Stored(values, torch.zeros_like(values))
        return quantised(turned, self.name, is_exact=not self.rotation)

    def differs(self, read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """[R] bool: rows [R, W] that were read are not what the cache makes of those that were written."""
        held = self.stored(written)
        error = (self.turned(read.to(torch.float64)) - held.values).abs()
        allowance = held.slack * (1 + 1e-6)
        if self.rotation:  # the basis is undone in float32 where the cache is read
            allowance = allowance + 1e-6 * held.values.abs().amax(dim=-1, keepdim=True)
        return ~(error <= allowance).all(dim=1)


def _rotated(x: torch.Tensor, size: int) -> torch.Tensor:
    if not size:
        return x
    matrix = _hadamard(size).to(x.device)
    turned: torch.Tensor = (x.to(torch.float64).unflatten(-1, (-1, size)) @ matrix).flatten(-2)
    return turned


@cache
def _hadamard(size: int) -> torch.Tensor:
    """[size, size] float64, orthonormal and symmetric (Sylvester's construction)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
