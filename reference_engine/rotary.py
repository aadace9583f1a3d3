"""Rotary position embedding, bit for bit as transformers computes it.

The frequencies and the angles are computed in float32 in transformers' order of operations (`modeling_rope_utils.py`);
cosine and sine are rounded to the engine's dtype before they are used.

Shapes: T tokens, N heads (of queries or of keys), H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.model_config import ModelConfig, RopeConfig
from reference_engine.errors import UnsupportedModelError

__all__ = ["ROPE_TYPES", "RotaryEmbedding", "apply_rotary", "rotate_half"]


class RotaryEmbedding:
    """Turns positions into the cosines and sines that rotate q and k.

    Raises:
        UnsupportedModelError: the rope type is not in `ROPE_TYPES`.
        ConfigError: a parameter of the type is missing or impossible.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        rope = config.rope
        if rope.rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                "unsupported rope_type",
                where="config.json",
                expected=f"one of {', '.join(ROPE_TYPES)}",
                actual=rope.rope_type,
            )
        # Computed on the CPU and then moved, as transformers does, so that the bits do not depend on the device.
        self.inv_freq = ROPE_TYPES[rope.rope_type](rope, config.head_dim).to(device)
        self._dtype = dtype

    def __call__(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each [T, 1, H] in the engine's dtype."""
        angles = positions_T[:, None].float() * self.inv_freq
        angles_T1H = torch.cat((angles, angles), dim=-1)[:, None]
        return angles_T1H.cos().to(self._dtype), angles_T1H.sin().to(self._dtype)


def apply_rotary(x_TNH: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its position's angles: x cos + rotate_half(x) sin, every product rounded to the dtype."""
    return (x_TNH * cos_T1H) + (rotate_half(x_TNH) * sin_T1H)


def rotate_half(x_TNH: torch.Tensor) -> torch.Tensor:
    """Pair element i with i + H/2: (a, b) becomes (-b, a)."""
    a, b = x_TNH.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _default_inv_freq(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return [H/2] float32 inverse frequencies theta^(-2i/H) (Su et al. 2021, section 3.2.2)."""
    exponents: torch.Tensor = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    inv_freq: torch.Tensor = 1.0 / (rope.theta**exponents)
    return inv_freq


def _llama3_inv_freq(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Stretch the long wavelengths by `factor`, keep the short ones, blend between (Llama 3.1's scaling)."""
    fields = ConfigFields(rope.parameters, "rope_parameters of type llama3")
    factor = fields.number("factor")
    low_freq_factor = fields.number("low_freq_factor")
    high_freq_factor = fields.number("high_freq_factor")
    original_len = fields.positive_int("original_max_position_embeddings")
    inv_freq = _default_inv_freq(rope, head_dim)
    wavelen = 2 * math.pi / inv_freq
    is_long = wavelen > original_len / low_freq_factor
    is_short = wavelen < original_len / high_freq_factor
    stretched = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original_len / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(~is_short & ~is_long, blended, stretched)


ROPE_TYPES: Mapping[str, Callable[[RopeConfig, int], torch.Tensor]] = {
    "default": _default_inv_freq,
    "llama3": _llama3_inv_freq,
}
