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


Rotation = tuple[torch.Tensor, float]
"""Inverse frequencies, [H/2] float32, and a factor of cosine and sine."""


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
        inv_freq, self.scale = ROPE_TYPES[rope.rope_type](rope, config.head_dim)
        self.inv_freq = inv_freq.to(device)
        self._dtype = dtype

    def __call__(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each [T, 1, H] in the engine's dtype."""
        angles = positions_T[:, None].float() * self.inv_freq
        angles_T1H = torch.cat((angles, angles), dim=-1)[:, None]
        cos_T1H, sin_T1H = angles_T1H.cos(), angles_T1H.sin()
        if self.scale != 1:
            cos_T1H, sin_T1H = cos_T1H * self.scale, sin_T1H * self.scale
        return cos_T1H.to(self._dtype), sin_T1H.to(self._dtype)


def apply_rotary(x_TNH: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its position's angles: x cos + rotate_half(x) sin, every product rounded to the dtype."""
    return (x_TNH * cos_T1H) + (rotate_half(x_TNH) * sin_T1H)


def rotate_half(x_TNH: torch.Tensor) -> torch.Tensor:
    """Pair element i with i + H/2: (a, b) becomes (-b, a)."""
    a, b = x_TNH.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _wavelengths(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return [H/2] float32 theta^(2i/H)."""
    exponents: torch.Tensor = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    wavelengths: torch.Tensor = rope.theta**exponents
    return wavelengths


def _default(rope: RopeConfig, head_dim: int) -> Rotation:
    """Take inverse frequencies theta^(-2i/H) (Su et al. 2021, section 3.2.2)."""
    return 1.0 / _wavelengths(rope, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int) -> Rotation:
    """Stretch every wavelength by `factor` (Chen et al. 2023, position interpolation)."""
    factor = ConfigFields(rope.parameters, "rope_parameters of type linear").number("factor")
    return 1.0 / _wavelengths(rope, head_dim) / factor, 1.0


def _yarn(rope: RopeConfig, head_dim: int) -> Rotation:
    """Stretch the pairs that turn less than `beta_slow` times in the original context, keep those above `beta_fast`.

    Source: Peng et al. 2023, section 3.2; cosine and sine grow with the logarithm of the factor (section 3.4).
    """
    fields = ConfigFields(rope.parameters, "rope_parameters of type yarn")
    factor = fields.number("factor")
    original_len = fields.positive_int("original_max_position_embeddings")
    turns = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    first, last = (head_dim * math.log(original_len / (n * 2 * math.pi)) / (2 * math.log(rope.theta)) for n in turns)
    if fields.boolean("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers does, so that there is no division by zero
    wavelengths = _wavelengths(rope, head_dim)
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float) - first) / (last - first)).clamp(0, 1)
    inv_freq = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return inv_freq, _yarn_scale(fields, factor)


def _yarn_scale(fields: ConfigFields, factor: float) -> float:
    if fields.values.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        return _grown(factor, fields.number("mscale")) / _grown(factor, fields.number("mscale_all_dim"))
    return _grown(factor, 1.0)


def _grown(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeConfig, head_dim: int) -> Rotation:
    """Stretch the long wavelengths by `factor`, keep the short ones, blend between (Llama 3.1's scaling)."""
    fields = ConfigFields(rope.parameters, "rope_parameters of type llama3")
    factor = fields.number("factor")
    low_freq_factor = fields.number("low_freq_factor")
    high_freq_factor = fields.number("high_freq_factor")
    original_len = fields.positive_int("original_max_position_embeddings")
    inv_freq = 1.0 / _wavelengths(rope, head_dim)
    wavelen = 2 * math.pi / inv_freq
    is_long = wavelen > original_len / low_freq_factor
    is_short = wavelen < original_len / high_freq_factor
    stretched = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original_len / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(~is_short & ~is_long, blended, stretched), 1.0


ROPE_TYPES: Mapping[str, Callable[[RopeConfig, int], Rotation]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Those whose angles do not depend on the length of the sequence: a cached key would have to be rotated again."""
