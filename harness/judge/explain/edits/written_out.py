"""Modules of torch in a few lines of Python, whose own code is a call into a library, so that it can be changed."""

import torch
from torch import nn


def layer_norm(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """Return what `nn.LayerNorm` does over the last dimension."""
    mean = input.mean(-1, keepdim=True)
    centred = input - mean
    variance = centred.square().mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(variance + self.eps)
    if self.weight is not None:
        normed = normed * self.weight
    if self.bias is not None:
        normed = normed + self.bias
    return normed


WRITTEN_OUT = {nn.LayerNorm.forward: layer_norm}
