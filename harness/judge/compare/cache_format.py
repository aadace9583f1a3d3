"""The format of a KV cache: another dtype, numbers in few bits with a scale, or blocks of integers with a scale.

`R` rows, `W` elements of a row.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from harness.base.numerics import Numerics
from harness.judge.compare.cache_blocks import FORMATS, Stored, quantised
from harness.judge.compare.cache_grids import (
    BLOCKS,
    GRIDS,
    grid,
    in_blocks,
    on_grid,
    scale_of_blocks,
    scale_of_largest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """The format of keys, or of values."""

    name: str
    """A dtype of torch's, or one of `FORMATS`, `GRIDS` or `BLOCKS`."""
    scales: tuple[float, ...] = ()
    """See `Numerics.cache_scales`."""
    scale_of: str = ""
    """See `Numerics.cache_scale_of`; empty for none."""
    num_heads: int = 1
    """KV heads of a row that is flat."""
    interleaved_heads: int = 0
    """See `Numerics`."""
    rotation: int = 0
    """Size of the Hadamard matrix that turns parts of heads."""

    @classmethod
    def declared(
        cls, numerics: Numerics, part: Literal["k", "v"], layer: str = "", num_heads: int = 1
    ) -> "CacheFormat | None":
        """Return the declared format of keys or of values; None if none is declared.

        `layer` is the prefix of the taps of a layer, with its dot; `num_heads` counts the KV heads of rows [R, W].
        """
        is_key = part == "k"
        name = numerics.cache if is_key or numerics.cache_values is None else numerics.cache_values
        if name is None:
            return None
        return cls(
            name=name,
            scales=numerics.cache_scales.get(f"{layer}{part}_cache", ()),
            scale_of=numerics.cache_scale_of or "",
            num_heads=num_heads,
            interleaved_heads=numerics.interleaved_heads if is_key else 0,
            rotation=numerics.cache_rotations[0 if is_key else 1],
        )

    @property
    def has_scale(self) -> bool:
        """Whether numbers are divided before they are stored."""
        return bool(self.scales or self.scale_of) or self.name in BLOCKS

    @property
    def title(self) -> str:
        """The name, with what has a scale."""
        if self.scale_of:
            return f"{self.name} with a scale for each {'token' if self.scale_of == 'token' else 'head of a token'}"
        if len(self.scales) == 1:
            return f"{self.name} with a scale of {self.scales[0]:.4g}"
        return f"{self.name} with a scale for each head" if self.scales else self.name

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None for a format of blocks or with scales, and for what is neither."""
        dtype = None if self.has_scale else getattr(torch, self.name, None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

    @property
    def is_known(self) -> bool:
        """Whether values can be rounded to it."""
        if self.name in BLOCKS:
            return not self.scale_of and (self.name == "nvfp4" or not self.scales)
        return self.name in GRIDS if self.has_scale else self.dtype is not None or self.name in FORMATS

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

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scale of each of [R, K, ..., H], float64; raises RuntimeError if there are not as many heads."""
        if self.scale_of:
            return scale_of_largest(x, self.name, self.scale_of)
        still = self.still(x)
        return scale_of_blocks(x, self.name, still) if self.name in BLOCKS else still

    def still(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scales that stand still, float64, so that they fit [R, K, ..., H]; 1 where there are none."""
        scales = torch.tensor(self.scales or (1.0,), dtype=torch.float64, device=x.device)
        return scales.view(1, -1, *([1] * (x.dim() - 2)))

    def stored(self, x: torch.Tensor) -> Stored:
        """Return what the cache holds of keys or values [..., W]; [R, W] or [R, K, ..., H] if it has scales."""
        if self.has_scale:
            heads = x.unflatten(1, (self.num_heads, -1)) if x.dim() == 2 else x
            if self.name in BLOCKS:
                held = in_blocks(heads, self.name, self.still(heads))
            else:
                held = on_grid(heads, self.name, self.scale(heads))
            return Stored(held.values.reshape(x.shape), held.slack.reshape(x.shape))
        turned = self.turned(x)
        if self.dtype is not None:
            values = turned.to(self.dtype).to(torch.float64)
            return Stored(values, torch.zeros_like(values))
        return quantised(turned, self.name, is_exact=not self.rotation)

    def num_clipped(self, x: torch.Tensor) -> torch.Tensor:
        """Count the numbers of each KV head that lie beyond the largest of the format: [K] int64, of rows as `stored`.

        Of these the cache gives back the largest; half a step beyond is still a rounding.
        """
        heads = x.unflatten(1, (self.num_heads, -1)) if x.dim() == 2 else x
        top = grid(self.name)[0]
        step = 0.5
        if not self.name.startswith("int"):
            eps = 0.5 if self.name in BLOCKS else torch.finfo(getattr(torch, self.name)).eps
            step = eps / 2 * 2.0 ** int(math.log2(top))
        scaled = heads.to(torch.float64) / self.scale(heads)
        is_beyond = (scaled > top + step) | (scaled < -top - step - self.name.startswith("int"))
        return is_beyond.sum(dim=[dim for dim in range(heads.dim()) if dim != 1])

    def differs(self, read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """[R] bool: rows [R, W] that were read are not what the cache makes of those that were written."""
        held = self.stored(written)
        error = (self.turned(read.to(torch.float64)) - held.values).abs()
        allowance = held.slack * (1 + 1e-6)
        if self.rotation:  # the basis is undone in float32 where the cache is read
            allowance = allowance + 1e-6 * held.values.abs().amax(dim=-1, keepdim=True)
        if self.has_scale:  # the product with the scale is rounded where the cache is read
            info = torch.finfo(read.dtype)  # below its smallest normal number the steps are all alike
            allowance = allowance + info.eps * held.values.abs().clamp(min=info.tiny)
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
