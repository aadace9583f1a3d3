"""What a KV cache makes of the keys and values that it is given: another dtype, or blocks of integers with a scale.

`R` rows, `W` elements of a row, `B` blocks, `S` elements of a block. Formulas: ggml's `quantize_row_q8_0` (x86) and
`quantize_row_q4_0_ref`, in float32 as there.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from harness.numerics import Numerics

_BLOCK = 32
_LEVELS = {"Q4_0": 8, "Q5_0": 16}
"""Formats whose value of the largest magnitude becomes minus this many steps."""
FORMATS = ("Q8_0", *_LEVELS)
_TIE = 5 * 2.0**-24
"""Distance from the middle of two integers, as a share of the number, within which float32 may round either way: ours
is the product with one quotient (two roundings), another's with the inverse of a quotient (three)."""
_TIE_ROTATED = 2e-4
"""The distance itself, of values that were turned, by sums in any order."""
_NEAR = 1e-6
"""Relative error of the scale of a block of turned values: on a tie of float16 it may round either way."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a cache holds; tensors [..., W], in the order and the basis of the cache."""

    values: torch.Tensor
    """float64."""
    slack: torch.Tensor
    """float64: by how much an element on a rounding tie may differ; 0 for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How keys or values are kept."""

    name: str
    """A dtype of torch's, or one of `FORMATS`."""
    interleaved_heads: int = 0
    """See `Numerics`."""
    rotation: int = 0
    """Size of the Hadamard matrix that turns parts of heads."""

    @classmethod
    def declared(cls, numerics: Numerics, part: Literal["k", "v"]) -> "CacheFormat | None":
        """Return the declared format of keys or of values; None where none is declared."""
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
        room = held.slack * (1 + 1e-6)
        if self.rotation:  # the basis is undone in float32 where the cache is read
            room = room + 1e-6 * held.values.abs().amax(dim=-1, keepdim=True)
        return ~(error <= room).all(dim=1)


def quantised(x: torch.Tensor, name: str, *, is_exact: bool = True) -> Stored:
    """Quantise [..., W] in blocks of 32.

    Args:
        x: values as the engine has them.
        name: one of `FORMATS`.
        is_exact: whether they are the engine's own bits; else they are near them.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, _BLOCK))
    if name == "Q8_0":
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        scale, inverse = largest / 127, 127 / largest
        scaled = torch.where(largest > 0, blocks * inverse, 0.0)
        size, integers = scaled.abs(), scaled.round()
    else:
        levels = _LEVELS[name]
        largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
        scale = largest / -levels
        scaled = torch.where(scale != 0, blocks * (1 / scale), 0.0)
        shifted = scaled + (levels + 0.5)
        size, integers = scaled.abs().maximum(shifted), shifted.floor().clamp(0, 2 * levels - 1) - levels
    step = scale.to(torch.float16).to(torch.float64)
    to_tie = (scaled.to(torch.float64) % 1 - 0.5).abs()
    is_tie = to_tie <= _TIE * size if is_exact else to_tie < _TIE_ROTATED
    slack = torch.where(is_tie, step.abs(), 0.0)
    if not is_exact:
        low, high = (((1 + sign * _NEAR) * scale).to(torch.float16).to(torch.float64) for sign in (-1, 1))
        slack = slack + integers.abs() * (high - low).abs()
    return Stored((integers * step).flatten(-2), slack.flatten(-2))


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
