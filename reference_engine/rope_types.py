"""How positions become rotary frequencies: the rope types of config.json, bit for bit as transformers computes them.

The frequencies are computed in float32 in transformers' order of operations (`modeling_rope_utils.py`).

Shapes: H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.model_config import RopeConfig
from reference_engine.checkpoint.rope_config import yarn_growth

__all__ = ["LENGTH_ROPE_TYPES", "ROPE_TYPES", "Frequencies"]

Frequencies = tuple[torch.Tensor, float]
"""Inverse frequencies, [H/2] float32, and a factor of cosine and sine."""


def _wavelengths(theta: float | torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return [H/2] float32 theta^(2i/H)."""
    exponents: torch.Tensor = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    wavelengths: torch.Tensor = theta**exponents
    return wavelengths


def _default(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Take inverse frequencies theta^(-2i/H) (Su et al. 2021, section 3.2.2)."""
    return 1.0 / _wavelengths(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Stretch every wavelength by `factor` (Chen et al. 2023, position interpolation)."""
    factor = ConfigFields(rope.parameters, "rope_parameters of type linear").number("factor")
    return 1.0 / _wavelengths(rope.theta, head_dim) / factor, 1.0


def _yarn(rope: RopeConfig, head_dim: int) -> Frequencies:
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
    wavelengths = _wavelengths(rope.theta, head_dim)
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float) - first) / (last - first)).clamp(0, 1)
    inv_freq = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return inv_freq, _yarn_scale(fields, factor)


def _yarn_scale(fields: ConfigFields, factor: float) -> float:
    if fields.values.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        return yarn_growth(factor, fields.number("mscale")) / yarn_growth(factor, fields.number("mscale_all_dim"))
    return yarn_growth(factor, 1.0)


def _llama3(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Stretch the long wavelengths by `factor`, keep the short ones, blend between (Llama 3.1's scaling)."""
    fields = ConfigFields(rope.parameters, "rope_parameters of type llama3")
    factor = fields.number("factor")
    low_freq_factor = fields.number("low_freq_factor")
    high_freq_factor = fields.number("high_freq_factor")
    original_len = fields.positive_int("original_max_position_embeddings")
    inv_freq = 1.0 / _wavelengths(rope.theta, head_dim)
    wavelen = 2 * math.pi / inv_freq
    is_long = wavelen > original_len / low_freq_factor
    is_short = wavelen < original_len / high_freq_factor
    stretched = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original_len / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where(~is_short & ~is_long, blended, stretched), 1.0


def _dynamic(rope: RopeConfig, head_dim: int, rope_len: int) -> Frequencies:
    """Raise theta with the length of the sequence beyond the original context (dynamic NTK-aware scaling).

    Source: Peng et al. 2023, section 3.3 and appendix A.1.
    """
    fields = ConfigFields(rope.parameters, "rope_parameters of type dynamic")
    factor, original_len = fields.number("factor"), fields.positive_int("original_max_position_embeddings")
    # Transformers computes in float32 beyond the original context, where the length is a tensor, and in float64 within.
    length = torch.tensor(rope_len) if rope_len > original_len else original_len
    growth = ((factor * length / original_len) - (factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / _wavelengths(rope.theta * growth, head_dim), 1.0


def _longrope(rope: RopeConfig, head_dim: int, rope_len: int) -> Frequencies:
    """Stretch every wavelength by a factor of its own, of two lists by length (Ding et al. 2024, LongRoPE)."""
    fields = ConfigFields(rope.parameters, "rope_parameters of type longrope")
    factor, original_len = fields.number("factor"), fields.positive_int("original_max_position_embeddings")
    short, long = (fields.numbers(name, head_dim // 2) for name in ("short_factor", "long_factor"))
    stretches = torch.tensor(long if rope_len > original_len else short, dtype=torch.float)
    grown = math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
    return 1.0 / (stretches * _wavelengths(rope.theta, head_dim)), fields.number("attention_factor", grown)


ROPE_TYPES: Mapping[str, Callable[[RopeConfig, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Those whose angles do not depend on the length of the sequence."""

LENGTH_ROPE_TYPES: Mapping[str, Callable[[RopeConfig, int, int], Frequencies]] = {
    "dynamic": _dynamic,
    "longrope": _longrope,
}
"""Those that are given a length (`RopeConfig.rope_len`), of all tokens that a request may compute.

So it is the same in every step, and no cached key is ever rotated again; keys of other frequencies are not shared.
Transformers takes the length of each forward, which is the same if all tokens are in one.
"""
