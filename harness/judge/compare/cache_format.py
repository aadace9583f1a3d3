"""The format of a KV cache: another dtype, numbers in few bits with scales, or blocks of integers with a scale.

`R` rows, `W` elements of a row, `K` KV heads, `H` head size, `B` blocks, `S` elements of a block.

- Blocks of 32 integers with a scale, as ggml keeps keys and values, in float32 as there. Formulas: ggml's
  `quantize_row_q8_0` and `quantize_row_q8_1` (x86), `quantize_row_q4_0_ref`, `quantize_row_q4_1_ref`,
  `quantize_row_iq4_nl_ref`, and their like for 5 bits.
- Numbers in few bits with a scale for a cache, a KV head, a token, a head of a token, or 16 of its numbers. Source:
  what vLLM's `reshape_and_cache` and its per-token-head kernels store; for the two formats in blocks SGLang's
  `KVFP4QuantizeUtil` and NVIDIA's NVFP4.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

from harness.base.numerics import Numerics

_BLOCK = 32
_LEVELS = {"Q4_0": 8, "Q5_0": 16}
"""Formats whose value of the largest magnitude becomes minus this number of steps."""
_STEPS = {"Q4_1": 15, "Q5_1": 31}
"""Formats that store the least value of a block, and this number of steps from it to the largest."""
_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of IQ4_NL."""
FORMATS = ("Q8_0", *_LEVELS, *_STEPS, "IQ4_NL")
_TIE = 5 * 2.0**-24
"""Distance from the middle of two integers, as a share of the number, within which float32 may round up or down: here a
number is multiplied by one quotient (two roundings), in ggml by the inverse of a quotient (three)."""
_TIE_ROTATED = 2e-4
"""The distance itself for rotated values, which are sums in any order."""
_NEAR = 1e-6
"""Relative error of the scale of a block of rotated values: on a tie of float16 it may round up or down."""
_NEAR_SUMS = 4e-6
"""The same where the scale is a quotient of sums over the block."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of a cache; tensors [..., W] in the order and the basis of the cache."""

    values: torch.Tensor
    """float64."""
    slack: torch.Tensor
    """float64: by how much an element on a rounding tie may differ; 0 for all others."""
    minima: torch.Tensor | None = None
    """[..., W/S] float64: what is added to all elements of a block; None for formats without."""


def quantised(x: torch.Tensor, name: str, *, is_exact: bool = True) -> Stored:
    """Quantise [..., W] in blocks of 32.

    Args:
        x: values as the engine has them.
        name: one of `FORMATS`.
        is_exact: whether these are the engine's own bits; otherwise they are near them.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, _BLOCK))
    if name in _STEPS:
        return _from_minimum(blocks, _STEPS[name], is_exact)
    if name == "IQ4_NL":
        return _in_codebook(blocks, is_exact)
    if name == "Q8_0":
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        scale, inverse = largest / 127, 127 / largest
        scaled = torch.where(largest > 0, blocks * inverse, 0.0)
        size, integers = scaled.abs(), scaled.round()
    else:
        levels = _LEVELS[name]
        scale = _largest(blocks) / -levels
        scaled = torch.where(scale != 0, blocks * (1 / scale), 0.0)
        shifted = scaled + (levels + 0.5)
        size, integers = scaled.abs().maximum(shifted), shifted.floor().clamp(max=2 * levels - 1) - levels
    step = _float16(scale)
    slack = torch.where(_is_tie(scaled, size, is_exact), step.abs(), 0.0)
    if not is_exact:
        slack = slack + integers.abs() * _allowance(scale, _NEAR)
    return Stored((integers * step).flatten(-2), slack.flatten(-2))


def _from_minimum(blocks: torch.Tensor, num_steps: int, is_exact: bool) -> Stored:
    """Count steps from the least value of a block. Step and least value are kept in float16."""
    least, largest = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    scale = (largest - least) / num_steps
    scaled = torch.where(scale != 0, (blocks - least) * (1 / scale), 0.0)
    shifted = scaled + 0.5
    integers, step, minimum = shifted.floor().clamp(max=num_steps), _float16(scale), _float16(least)
    slack = torch.where(_is_tie(scaled, shifted, is_exact), step, 0.0)
    if not is_exact:
        extent = blocks.abs().amax(dim=-1, keepdim=True)  # the errors of rotating are a share of it
        slack = slack + integers * _allowance(scale, _NEAR, extent / num_steps) + _allowance(least, _NEAR, extent)
    return Stored((integers * step + minimum).flatten(-2), slack.flatten(-2), minimum.squeeze(-1))


def _in_codebook(blocks: torch.Tensor, is_exact: bool) -> Stored:
    """Take the nearest of 16 levels for each value, then the scale that fits them best, by the values' squares."""
    levels = torch.tensor(_CODEBOOK, dtype=torch.float64, device=blocks.device)
    middles = (levels[1:] + levels[:-1]) / 2
    first = _largest(blocks) / _CODEBOOK[0]
    scaled = torch.where(first != 0, blocks * (1 / first), 0.0)
    at = torch.bucketize(scaled.to(torch.float64), middles, right=True)
    chosen, wide = levels[at], blocks.to(torch.float64)
    weight = wide.square()
    total = (weight * chosen.square()).sum(dim=-1, keepdim=True)
    scale = torch.where(total > 0, (weight * chosen * wide).sum(dim=-1, keepdim=True) / total, 0.0)
    scale = scale.to(torch.float32)  # float16 makes a tiny scale 0, which ggml does earlier
    step = _float16(scale)
    to_tie, nearest = (scaled.to(torch.float64)[..., None] - middles).abs().min(dim=-1)
    is_tie = to_tie <= _TIE * scaled.abs() if is_exact else to_tie < _TIE_ROTATED
    to_neighbour = torch.where(is_tie, (levels[1:] - levels[:-1])[nearest], 0.0)
    # Another level for one value changes the scale of all: d' - d = -d w q (q' - q) / sum w q², to first order.
    moved = (weight * chosen.abs() * to_neighbour).sum(dim=-1, keepdim=True) / total * step.abs()
    moved = torch.where(moved > 0, 2 * moved + _allowance(scale, 2.0**-11), 0.0)
    slack = to_neighbour * step.abs() + chosen.abs() * (moved + _allowance(scale, _NEAR_SUMS))
    return Stored((chosen * step).flatten(-2), slack.flatten(-2))


def rounded_sums(x: torch.Tensor, *, is_exact: bool) -> torch.Tensor:
    """Return how far Q8_1's sums of blocks, which it keeps in float16, are from those of its values.

    Args:
        x: [..., W].
        is_exact: as in `quantised`.

    Returns:
        [..., W/S] float64.
    """
    held = quantised(x, "Q8_0", is_exact=is_exact).values.unflatten(-1, (-1, _BLOCK)).sum(dim=-1)
    blocks = x.to(torch.float32).unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    integers = torch.where(largest > 0, blocks * (127 / largest), 0.0).round().sum(dim=-1)
    difference: torch.Tensor = _float16(largest[..., 0] / 127 * integers) - held
    return difference


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """Return the value of the largest magnitude of each block, with its sign."""
    return blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))


def _float16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).to(torch.float64)


def _is_tie(scaled: torch.Tensor, size: torch.Tensor, is_exact: bool) -> torch.Tensor:
    to_tie = (scaled.to(torch.float64) % 1 - 0.5).abs()
    return to_tie <= _TIE * size if is_exact else to_tie < _TIE_ROTATED


def _allowance(value: torch.Tensor, share: float, extent: torch.Tensor | None = None) -> torch.Tensor:
    """Return how far apart float16 may round a value that is off by a share of itself, or of `extent`."""
    off = share * (value.abs() if extent is None else extent)
    return (_float16(value + off) - _float16(value - off)).abs()


_QUOTIENT = 2.0**-21
"""Relative error of a quotient in float32 and of its scale: near a tie it may be rounded up or down."""


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the nearest number of a dtype of few bits, float64."""
    return x.to(torch.float32).to(dtype).to(torch.float64)


GRIDS: Mapping[str, tuple[float, Callable[[torch.Tensor], torch.Tensor]]] = {
    "int8": (127.0, torch.round),
    "int4": (7.0, torch.round),
    **{
        str(dtype).removeprefix("torch."): (torch.finfo(dtype).max, partial(in_dtype, dtype=dtype))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    },
}
"""Formats of few bits: the largest number, and the function that returns the nearest number within the range."""
SHARES: Mapping[str, tuple[int, ...]] = {"token": (1, -1), "head": (-1,)}
"""Dimensions of [R, K, ..., H] over which numbers share a scale that follows their largest."""


_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
"""Magnitudes of four bits, E2M1."""
BLOCK_SIZE = 16
_E4M3 = torch.float8_e4m3fn


def nearest_of_four_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest number of E2M1, float64; on a tie the larger."""
    return _of_levels(x, (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2)


def four_bits_cut_off(x: torch.Tensor) -> torch.Tensor:
    """Return the next number of E2M1 towards zero, float64."""
    return _of_levels(x, _MAGNITUDES[1:])


def _of_levels(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    size = x.abs().to(torch.float64).contiguous()
    return _MAGNITUDES.to(x.device)[torch.bucketize(size, bounds.to(x.device), right=True)].copysign(x)


def _power_of_two(share: torch.Tensor, _still: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.log2(share.clamp(min=1e-10)).ceil())


def _in_e4m3(share: torch.Tensor, still: torch.Tensor) -> torch.Tensor:
    return in_dtype((share / still).clamp(max=torch.finfo(_E4M3).max), _E4M3) * still


BLOCKS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mxfp4": _power_of_two, "nvfp4": _in_e4m3,
}  # fmt: skip
"""Formats of four bits: functions from a sixth of a block's largest number and a fixed scale to the block's scale. That
of `nvfp4` is a number of E4M3 times the fixed scale; that of `mxfp4` is a power of two alone."""
FOUR_BITS = (6.0, nearest_of_four_bits)
"""The entry of `GRIDS` for the formats in `BLOCKS`."""


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    """Return [..., H/16, 16] of [..., H]; raises RuntimeError where 16 does not divide the head size."""
    blocks: torch.Tensor = x.unflatten(-1, (-1, BLOCK_SIZE))
    return blocks


def scale_of_blocks(x: torch.Tensor, name: str, still: torch.Tensor, off: float = 0.0) -> torch.Tensor:
    """Return the scale of the block of each of [R, K, ..., H], float64; the block's largest number is off by `off`."""
    share = blocks_of(x.to(torch.float64)).abs().amax(dim=-1, keepdim=True) * (1 + off) / FOUR_BITS[0]
    scale = BLOCKS[name](share, still[..., None])
    of_each: torch.Tensor = torch.where(scale > 0, scale, 1.0).expand(*scale.shape[:-1], BLOCK_SIZE).flatten(-2)
    return of_each


def in_blocks(x: torch.Tensor, name: str, still: torch.Tensor) -> Stored:
    """Return what is stored of [R, K, ..., H] in blocks, with a fixed scale that can be broadcast to it.

    The scale of a block near a tie may be either of two scales, and a number near a tie either of two numbers.
    """
    held = [
        on_grid(x, name, scale_of_blocks(x, name, still, off)) for off in (0.0, -_QUOTIENT, _QUOTIENT)
    ]  # fmt: skip
    values = torch.stack([item.values for item in held])
    return Stored(values[0], torch.stack([item.slack for item in held]).amax(0) + values.amax(0) - values.amin(0))


def grid(name: str) -> tuple[float, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the largest number of a format, and the function to its nearest number; raises KeyError for others."""
    return FOUR_BITS if name in BLOCKS else GRIDS[name]


def clipped(x: torch.Tensor, name: str) -> torch.Tensor:
    """Clip scaled numbers to the range of a format; integers have one more negative number."""
    top = grid(name)[0]
    return x.clamp(-top - (name.startswith("int")), top)


def on_grid(x: torch.Tensor, name: str, scale: torch.Tensor) -> Stored:
    """Return what is stored of [R, K, ..., H] with a scale that can be broadcast to it."""
    nearest = grid(name)[1]
    scaled = x.to(torch.float64) / scale
    low, here, high = (nearest(clipped(scaled * (1 + off), name)) for off in (-_QUOTIENT, 0, _QUOTIENT))
    return Stored(here * scale, (high - low).abs() * scale)


def scale_of_largest(x: torch.Tensor, name: str, share: str) -> torch.Tensor:
    """Return the scale, float64, that maps the largest number that shares it to the largest of the format."""
    largest = x.to(torch.float32).abs().amax(dim=SHARES[share], keepdim=True)
    scale: torch.Tensor = (torch.where(largest > 0, largest, 1.0) / GRIDS[name][0]).to(torch.float64)
    return scale


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
    """Size of the Hadamard matrix that rotates parts of heads."""

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
        """Whether numbers are divided by a scale before they are stored."""
        return bool(self.scales or self.scale_of) or self.name in BLOCKS

    @property
    def title(self) -> str:
        """The name, with what shares a scale."""
        if self.scale_of:
            return f"{self.name} with a scale for each {'token' if self.scale_of == 'token' else 'head of a token'}"
        if len(self.scales) == 1:
            return f"{self.name} with a scale of {self.scales[0]:.4g}"
        return f"{self.name} with a scale for each head" if self.scales else self.name

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None for a format that is not a plain dtype."""
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
        """Return the fixed scales, float64, in a shape that fits [R, K, ..., H]; 1 where there are none."""
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
        """Count the numbers of each KV head that lie beyond the range of the format: [K] int64, of rows as in `stored`.

        For these the cache returns the largest number of the format. Half a step beyond is still a rounding.
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
        """[R] bool: rows [R, W] that were read differ from what the cache stores of the written rows."""
        held = self.stored(written)
        error = (self.turned(read.to(torch.float64)) - held.values).abs()
        allowance = held.slack * (1 + 1e-6)
        if self.rotation:  # the reader undoes the basis in float32
            allowance = allowance + 1e-6 * held.values.abs().amax(dim=-1, keepdim=True)
        if self.has_scale:  # the reader rounds the product with the scale
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
