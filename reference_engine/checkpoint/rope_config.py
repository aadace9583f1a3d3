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

__all__ = ["RopeConfig", "read_ropes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its type, its base, and what else the type needs."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]
    """The type's own parameters as config.json gives them (`factor`, `low_freq_factor`, ...)."""

    def max_positions(self, max_position_embeddings: int) -> int:
        """Return the positions that the embedding is made for: the config's, or the factor times the original ones.

        Configs of Qwen name the original context as `max_position_embeddings` too, those of Llama 3 the whole one.
        """
        factor = self.parameters.get("factor")
        if self.rope_type == "default" or not isinstance(factor, int | float) or not math.isfinite(factor):
            return max_position_embeddings
        return max(max_position_embeddings, int(factor * self.parameters["original_max_position_embeddings"]))


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
    own: Any = parameters
    local: Any = {}
    if local_theta is not None and _is_by_layer_type(parameters):
        own, local = (parameters.get(name) or {} for name in ("full_attention", "sliding_attention"))
    rope = _rope(fields, own, "rope_theta", family.default_rope_theta, max_position_embeddings)
    if local_theta is None:
        return rope, None
    return rope, _rope(fields, local, "rope_local_base_freq", local_theta, max_position_embeddings)


def _is_by_layer_type(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def _rope(
    fields: ConfigFields, parameters: Any, theta_field: str, default_theta: float, max_position_embeddings: int
) -> RopeConfig:
    values = fields.values
    if not isinstance(parameters, Mapping) or _is_by_layer_type(parameters):
        raise UnsupportedModelError(
            "unsupported rope_parameters", where=fields.where, expected="one set for all layers",
            actual=list(parameters) if isinstance(parameters, Mapping) else parameters,
        )  # fmt: skip
    partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            "unsupported partial_rotary_factor", where=fields.where, expected="1.0", actual=partial
        )
    given = {"rope_theta": values.get(theta_field), **parameters}
    theta = ConfigFields(given, fields.where).number("rope_theta", default_theta)
    own = {"original_max_position_embeddings": max_position_embeddings, **parameters}
    if values.get("original_max_position_embeddings") is not None:  # outranks the nested one, as in transformers
        own["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return RopeConfig(rope_type=str(own.get("rope_type", own.get("type", "default"))), theta=theta, parameters=own)
