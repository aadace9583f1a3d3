"""Blocks of 32 integers with a scale, as ggml keeps keys and values, in float32 as there.

`B` blocks, `S` elements of a block. Formulas: ggml's `quantize_row_q8_0` and `quantize_row_q8_1` (x86),
`quantize_row_q4_0_ref`, `quantize_row_q4_1_ref`, `quantize_row_iq4_nl_ref`, and their like for 5 bits.
"""

from dataclasses import dataclass

import torch

_BLOCK = 32
_LEVELS = {"Q4_0": 8, "Q5_0": 16}
"""Formats whose value of the largest magnitude becomes minus this many steps."""
_STEPS = {"Q4_1": 15, "Q5_1": 31}
"""Formats with so many steps from the least value, which is kept, to the largest."""
_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Of IQ4_NL."""
FORMATS = ("Q8_0", *_LEVELS, *_STEPS, "IQ4_NL")
_TIE = 5 * 2.0**-24
"""Distance from the middle of two integers, as a share of the number, within which float32 may round either way: ours
is the product with one quotient (two roundings), another's with the inverse of a quotient (three)."""
_TIE_ROTATED = 2e-4
"""The distance itself, of values that were turned, by sums in any order."""
_NEAR = 1e-6
"""Relative error of the scale of a block of turned values: on a tie of float16 it may round either way."""
_NEAR_SUMS = 4e-6
"""The same where the scale is a quotient of sums over the block."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of a cache; tensors [..., W], in the order and the basis of the cache."""

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
        is_exact: whether they are the engine's own bits; else they are near them.
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
        extent = blocks.abs().amax(dim=-1, keepdim=True)  # of which the errors of turning are a share
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
    scale = scale.to(torch.float32)  # of a block of almost nothing float16 makes 0, as ggml does before
    step = _float16(scale)
    to_tie, nearest = (scaled.to(torch.float64)[..., None] - middles).abs().min(dim=-1)
    is_tie = to_tie <= _TIE * scaled.abs() if is_exact else to_tie < _TIE_ROTATED
    other = torch.where(is_tie, (levels[1:] - levels[:-1])[nearest], 0.0)
    # Another level for one value changes the scale of all: d' - d = -d w q (q' - q) / sum w q², to first order.
    moved = (weight * chosen.abs() * other).sum(dim=-1, keepdim=True) / total * step.abs()
    moved = torch.where(moved > 0, 2 * moved + _allowance(scale, 2.0**-11), 0.0)
    slack = other * step.abs() + chosen.abs() * (moved + _allowance(scale, _NEAR_SUMS))
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
