"""Numbers in few bits with a scale of its own for a cache, a KV head, a token, or a head of a token.

`R` rows, `K` KV heads, `H` head size. Source: what vLLM's `reshape_and_cache` and its per-token-head kernels store.
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


def clipped(x: torch.Tensor, name: str) -> torch.Tensor:
    """Cut scaled numbers at the ends of a format; integers have one more below."""
    top = GRIDS[name][0]
    return x.clamp(-top - (name.startswith("int")), top)


def on_grid(x: torch.Tensor, name: str, scale: torch.Tensor) -> Stored:
    """Return what is stored of [R, K, ..., H] with a scale that can be broadcast to it."""
    nearest = GRIDS[name][1]
    scaled = x.to(torch.float64) / scale
    low, here, high = (nearest(clipped(scaled * (1 + off), name)) for off in (-_QUOTIENT, 0, _QUOTIENT))
    return Stored(here * scale, (high - low).abs() * scale)


def scale_of_largest(x: torch.Tensor, name: str, share: str) -> torch.Tensor:
    """Return the scale, float64, under which the largest of those that share it becomes the largest of the format."""
    largest = x.to(torch.float32).abs().amax(dim=SHARES[share], keepdim=True)
    scale: torch.Tensor = (torch.where(largest > 0, largest, 1.0) / GRIDS[name][0]).to(torch.float64)
    return scale
