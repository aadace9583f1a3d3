"""Numbers in few bits with a scale of its own for a cache, a KV head, a token, a head of a token, or 16 of its numbers.

`R` rows, `K` KV heads, `H` head size. Source: what vLLM's `reshape_and_cache` and its per-token-head kernels store;
for the two formats in blocks SGLang's `KVFP4QuantizeUtil` and NVIDIA's NVFP4.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from harness.judge.compare.cache_blocks import Stored

_QUOTIENT = 2.0**-21
"""Relative error of a quotient in float32, of its scale too: near a tie it may be rounded either way."""


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
"""Formats of few bits: the largest number, and the nearest one to a number within."""
SHARES: Mapping[str, tuple[int, ...]] = {"token": (1, -1), "head": (-1,)}
"""Dimensions of [R, K, ..., H] over which numbers share a scale that follows their largest."""


_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
"""Magnitudes of four bits, E2M1."""
BLOCK_SIZE = 16
_E4M3 = torch.float8_e4m3fn


def nearest_of_four_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest number of E2M1, float64; on a tie the larger."""
    return _of_levels(x, (_LEVELS[1:] + _LEVELS[:-1]) / 2)


def four_bits_cut_off(x: torch.Tensor) -> torch.Tensor:
    """Return the next number of E2M1 towards zero, float64."""
    return _of_levels(x, _LEVELS[1:])


def _of_levels(x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    size = x.abs().to(torch.float64).contiguous()
    return _LEVELS.to(x.device)[torch.bucketize(size, bounds.to(x.device), right=True)].copysign(x)


def _power_of_two(share: torch.Tensor, _still: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.log2(share.clamp(min=1e-10)).ceil())


def _in_e4m3(share: torch.Tensor, still: torch.Tensor) -> torch.Tensor:
    return in_dtype((share / still).clamp(max=torch.finfo(_E4M3).max), _E4M3) * still


BLOCKS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mxfp4": _power_of_two, "nvfp4": _in_e4m3,
}  # fmt: skip
"""Formats of four bits: from a sixth of a block's largest number, and a scale that stands still, to the block's scale.
`nvfp4` has both, and the block's is a number of E4M3; that of `mxfp4` is a power of two, and nothing else."""
FOUR_BITS = (6.0, nearest_of_four_bits)
"""Of the formats in `BLOCKS`, what `GRIDS` has of others."""


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    """Return [..., H/16, 16] of [..., H]; raises RuntimeError where 16 does not divide the head size."""
    blocks: torch.Tensor = x.unflatten(-1, (-1, BLOCK_SIZE))
    return blocks


def scale_of_blocks(x: torch.Tensor, name: str, still: torch.Tensor, off: float = 0.0) -> torch.Tensor:
    """Return the scale of each of [R, K, ..., H], float64: of its block, the largest of which is off by a share."""
    share = blocks_of(x.to(torch.float64)).abs().amax(dim=-1, keepdim=True) * (1 + off) / FOUR_BITS[0]
    scale = BLOCKS[name](share, still[..., None])
    of_each: torch.Tensor = torch.where(scale > 0, scale, 1.0).expand(*scale.shape[:-1], BLOCK_SIZE).flatten(-2)
    return of_each


def in_blocks(x: torch.Tensor, name: str, still: torch.Tensor) -> Stored:
    """Return what is stored of [R, K, ..., H] in blocks, with a scale that stands still and can be broadcast to it.

    The scale of a block near a tie may be either of two, and so may a number near one.
    """
    held = [
        on_grid(x, name, scale_of_blocks(x, name, still, off)) for off in (0.0, -_QUOTIENT, _QUOTIENT)
    ]  # fmt: skip
    values = torch.stack([item.values for item in held])
    return Stored(values[0], torch.stack([item.slack for item in held]).amax(0) + values.amax(0) - values.amin(0))


def grid(name: str) -> tuple[float, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the largest number of a format, and what gives the nearest one; raises KeyError for others."""
    return FOUR_BITS if name in BLOCKS else GRIDS[name]


def clipped(x: torch.Tensor, name: str) -> torch.Tensor:
    """Cut scaled numbers at the ends of a format; integers have one more below."""
    top = grid(name)[0]
    return x.clamp(-top - (name.startswith("int")), top)


def on_grid(x: torch.Tensor, name: str, scale: torch.Tensor) -> Stored:
    """Return what is stored of [R, K, ..., H] with a scale that can be broadcast to it."""
    nearest = grid(name)[1]
    scaled = x.to(torch.float64) / scale
    low, here, high = (nearest(clipped(scaled * (1 + off), name)) for off in (-_QUOTIENT, 0, _QUOTIENT))
    return Stored(here * scale, (high - low).abs() * scale)


def scale_of_largest(x: torch.Tensor, name: str, share: str) -> torch.Tensor:
    """Return the scale, float64, under which the largest of those that share it becomes the largest of the format."""
    largest = x.to(torch.float32).abs().amax(dim=SHARES[share], keepdim=True)
    scale: torch.Tensor = (torch.where(largest > 0, largest, 1.0) / GRIDS[name][0]).to(torch.float64)
    return scale
