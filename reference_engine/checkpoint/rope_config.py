"""The fields of config.json that give the angles by which q and k are rotated.

Both spellings are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`, which a family whose
layers differ gives for each type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_engine.checkpoint.config_file import ConfigFields
from reference_engine.checkpoint.families import Family
from reference_engine.errors import ConfigError, UnsupportedModelError

__all__ = ["RopeConfig", "read_ropes", "yarn_growth"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its type, its base, and what else the type needs."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]
    """The type's own parameters as config.json gives them (`factor`, `low_freq_factor`, ...)."""
    partial_factor: float = 1.0
    """Share of each head that is rotated."""

    def max_positions(self, max_position_embeddings: int) -> int:
        """Return the positions that the embedding is made for: the config's, or the factor times the original ones.

        Configs of Qwen name the original context as `max_position_embeddings` too, those of Llama 3 the whole one.
        """
        factor = self.parameters.get("factor")
        if self.rope_type == "default" or not isinstance(factor, int | float) or not math.isfinite(factor):
            return max_position_embeddings
        return max(max_position_embeddings, int(factor * self.parameters["original_max_position_embeddings"]))

    @property
    def score_growth(self) -> float:
        """Factor by which scores of latent attention grow with a stretched context, by `mscale_all_dim`."""
        if self.rope_type == "default" or not self.parameters.get("mscale_all_dim"):
            return 1.0
        fields = ConfigFields(self.parameters, f"rope_parameters of type {self.rope_type}")
        return yarn_growth(fields.number("factor"), fields.number("mscale_all_dim")) ** 2

    def rope_len(self, num_tokens: int) -> int | None:
        """Return the shortest length whose frequencies a sequence of so many tokens has; None: all lengths have them.

        Frequencies of `dynamic` follow every length beyond the original context, those of `longrope` whether it is
        exceeded.
        """
        if self.rope_type not in ("dynamic", "longrope"):
            return None
        original_len: int = self.parameters["original_max_position_embeddings"]
        return (
            max(num_tokens, original_len) if self.rope_type == "dynamic" else original_len + (num_tokens > original_len)
        )


def yarn_growth(factor: float, weight: float) -> float:
    """Return the growth with the logarithm of a context's factor (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_ropes(
    fields: ConfigFields, family: Family, max_position_embeddings: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of the layers, and that of those with a window where the family has two.

    Raises:
        ConfigError: a value is impossible.
        UnsupportedModelError: the layers, or the parts of a head, are rotated in ways that the engine does not have.
    """
    values, local_theta = fields.values, family.default_local_rope_theta
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError("rope_parameters is no object", where=fields.where, expected="an object", actual=parameters)
    full: Any = parameters
    local: Any = {}
    if local_theta is not None and _is_by_layer_type(parameters):
        full, local = (parameters.get(name) or {} for name in ("full_attention", "sliding_attention"))
    partial = family.default_partial_rotary_factor
    rope = _rope(fields, full, "rope_theta", family.default_rope_theta, max_position_embeddings, partial)
    if local_theta is None:
        return rope, None
    local_rope = _rope(fields, local, "rope_local_base_freq", local_theta, max_position_embeddings)
    if local_rope.rope_len(1) is not None:
        raise UnsupportedModelError(
            "unsupported rope_type of layers with a window", where=fields.where,
            expected="frequencies that do not follow the length of the sequence", actual=local_rope.rope_type,
        )  # fmt: skip
    return rope, local_rope


def _partial_factor(fields: ConfigFields, parameters: Mapping[str, Any], default: float | None) -> float:
    """Return the share of each head that is rotated; `default` is None where the family rotates all of it."""
    name = "partial_rotary_factor"
    known = {name: fields.values.get(name), **parameters}
    factor = ConfigFields(known, fields.where).number(name, default or 1.0)
    if factor > 1 or (default is None and factor != 1):
        expected = "1.0" if default is None else "at most 1.0"
        raise UnsupportedModelError(f"unsupported {name}", where=fields.where, expected=expected, actual=factor)
    return factor


def _is_by_layer_type(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def _rope(
    fields: ConfigFields,
    parameters: Any,
    theta_field: str,
    default_theta: float,
    max_position_embeddings: int,
    default_partial: float | None = None,
) -> RopeConfig:
    values = fields.values
    if not isinstance(parameters, Mapping) or _is_by_layer_type(parameters):
        raise UnsupportedModelError(
            "unsupported rope_parameters", where=fields.where, expected="one set for all layers",
            actual=list(parameters) if isinstance(parameters, Mapping) else parameters,
        )  # fmt: skip
    known = {"rope_theta": values.get(theta_field), **parameters}
    theta = ConfigFields(known, fields.where).number("rope_theta", default_theta)
    rope = {"original_max_position_embeddings": max_position_embeddings, **parameters}
    if values.get("original_max_position_embeddings") is not None:  # outranks the nested one, as in transformers
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    if rope_type == "dynamic":  # which knows no other original context, as in transformers
        rope["original_max_position_embeddings"] = max_position_embeddings
    if rope_type == "longrope":
        original_len = ConfigFields(rope, fields.where).positive_int("original_max_position_embeddings")
        rope["factor"] = rope.get("factor") or max_position_embeddings / original_len
    partial = _partial_factor(fields, parameters, default_partial)
    return RopeConfig(rope_type=rope_type, theta=theta, parameters=rope, partial_factor=partial)
