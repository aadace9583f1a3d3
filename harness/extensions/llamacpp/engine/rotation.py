"""Heads of a quantised cache turn before they are stored: a Hadamard matrix spreads what sticks out.

See `attn_rot_k`, `build_input_k_rot` and `build_input_v_rot` in llama.cpp's src/llama-kv-cache.cpp.
"""

import os

import torch

from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.llamacpp.gguf.types import PLAIN

_LEAST = 64


def rotations(options: LlamaCppOptions, head_dim: int) -> tuple[int, int]:
    """Return the sizes of the matrices that turn parts of keys and of values; 0 for none."""
    if head_dim % _LEAST or os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0") not in ("", "0"):
        return 0, 0
    keys = _LEAST
    while head_dim % (2 * keys) == 0:
        keys *= 2
    sizes = [0 if name in PLAIN else size for name, size in zip(options.cache_names, (keys, _LEAST), strict=True)]
    return sizes[0], sizes[1]


def turned_back(x: torch.Tensor, size: int) -> torch.Tensor:
    """Undo the turn of rows [cells, W]: the fast transform, whose inverse is itself."""
    if not size:
        return x
    parts, width = x.double().unflatten(1, (-1, size)), 1
    while width < size:
        pairs = parts.unflatten(2, (-1, 2, width))
        parts = torch.stack((pairs.sum(3), pairs[..., 0, :] - pairs[..., 1, :]), dim=3).flatten(2)
        width *= 2
    turned: torch.Tensor = (parts / size**0.5).flatten(1)
    return turned.to(x.dtype)
