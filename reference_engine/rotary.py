"""Rotary position embedding, bit for bit as transformers computes it.

Angles are computed in float32, from the frequencies of `rope_types`; cosine and sine are rounded to the engine's dtype
before they are used.

Shapes: T tokens, N heads (of queries or of keys), H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import UnsupportedModelError
from reference_engine.rope_types import LENGTH_ROPE_TYPES, ROPE_TYPES, Frequencies

__all__ = ["RotaryEmbedding", "apply_rotary", "rotate_half"]


class RotaryEmbedding:
    """Turns positions into the cosines and sines that rotate q and k.

    Raises:
        UnsupportedModelError: the rope type is in neither `ROPE_TYPES` nor `LENGTH_ROPE_TYPES`.
        ConfigError: a parameter of the type is missing or impossible.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._rope, self._rotary_dim = config.rope, config.rotary_dim
        self._device, self._dtype = device, dtype
        self._by_len: dict[int, torch.Tensor] = {}
        self.follows_length = config.rope.rope_type in LENGTH_ROPE_TYPES
        """Whether a request's length decides its frequencies (`RopeConfig.rope_len`)."""
        if config.rope.rope_type not in ROPE_TYPES and not self.follows_length:
            raise UnsupportedModelError(
                "unsupported rope_type",
                where="config.json",
                expected=f"one of {', '.join((*ROPE_TYPES, *LENGTH_ROPE_TYPES))}",
                actual=config.rope.rope_type,
            )
        self.inv_freq, self.scale = self._rotation(config.rope.rope_len(1))

    def __call__(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each [T, 1, H] in the engine's dtype, of requests within the original context.

        H is the width of what is rotated of a head.
        """
        return self._turn(positions_T, self.inv_freq)

    def by_request(
        self, positions_T: torch.Tensor, rope_lens: Sequence[int], query_lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same of rows of several requests [R], which may follow lengths: each has so many of the rows."""
        if not self.follows_length:
            return self(positions_T)
        rows = zip(rope_lens, query_lens, strict=True)
        return self._turn(positions_T, torch.cat([self._inv_freq(rope_len).expand(num, -1) for rope_len, num in rows]))

    def _inv_freq(self, rope_len: int) -> torch.Tensor:
        if rope_len not in self._by_len:
            self._by_len[rope_len], _ = self._rotation(rope_len)
        return self._by_len[rope_len]

    def _rotation(self, rope_len: int | None) -> Frequencies:
        """Return the rotation of a length; computed on the CPU, so that the bits do not depend on the device."""
        rope, head_dim = self._rope, self._rotary_dim
        if rope_len is None:
            inv_freq, scale = ROPE_TYPES[rope.rope_type](rope, head_dim)
        else:
            inv_freq, scale = LENGTH_ROPE_TYPES[rope.rope_type](rope, head_dim, rope_len)
        return inv_freq.to(self._device), scale

    def _turn(self, positions_T: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions_T[:, None].float() * inv_freq
        angles_T1H = torch.cat((angles, angles), dim=-1)[:, None]
        cos_T1H, sin_T1H = angles_T1H.cos(), angles_T1H.sin()
        if self.scale != 1:
            cos_T1H, sin_T1H = cos_T1H * self.scale, sin_T1H * self.scale
        return cos_T1H.to(self._dtype), sin_T1H.to(self._dtype)


def apply_rotary(x_TNH: torch.Tensor, cos_T1H: torch.Tensor, sin_T1H: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its position's angles: x cos + rotate_half(x) sin, every product rounded to the dtype.

    Where there are fewer angles than a head is wide, the rest of the head stays as it is.
    """
    rotary_dim = cos_T1H.shape[-1]
    if rotary_dim < x_TNH.shape[-1]:
        return torch.cat([apply_rotary(x_TNH[..., :rotary_dim], cos_T1H, sin_T1H), x_TNH[..., rotary_dim:]], dim=-1)
    return (x_TNH * cos_T1H) + (rotate_half(x_TNH) * sin_T1H)


def rotate_half(x_TNH: torch.Tensor) -> torch.Tensor:
    """Pair element i with i + H/2: (a, b) becomes (-b, a)."""
    a, b = x_TNH.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)
