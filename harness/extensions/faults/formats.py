"""Numbers in 8 bits, as ggml keeps them: written once more here, apart from the judge's own formulas."""

import torch

_BLOCK = 32


def quantised(x: torch.Tensor, block: int = _BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers [..., I/block, block] and scales [..., I/block, 1] of Q8_0, or of other blocks."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (blocks * inverse).round(), scale.half().float()


def in_format(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return a checkpoint's tensor rounded to a dtype; to `Q8_0` if it is a matrix."""
    if name != "Q8_0":
        return x.to(getattr(torch, name)).to(x.dtype)
    if x.dim() != 2:
        return x
    integers, scale = quantised(x)
    return (integers * scale).flatten(-2).to(x.dtype)
