"""What config.json says of quantised weights, for the formats that are served: int8 with int8 inputs, and float8.

Sources: compressed-tensors' `quantization_config` (formats `int-quantized` and `float-quantized`), and the `fp8` of
DeepSeek and Qwen, whose scales belong to blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference_engine.errors import UnsupportedModelError

__all__ = ["Quantisation"]

_SERVED = "compressed-tensors with int8 weights and inputs, or with float8 weights, or fp8 in blocks"
_FIELDS = {
    "compressed-tensors": {
        "quant_method", "format", "config_groups", "ignore", "quantization_status", "kv_cache_scheme", "version",
        "global_compression_ratio",
    },
    "fp8": {
        "quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "scale_fmt",
    },
    "group": {"targets", "weights", "input_activations", "format"},
    "weights": {
        "type", "num_bits", "strategy", "symmetric", "dynamic", "block_structure", "observer", "observer_kwargs",
        "scale_dtype", "zp_dtype",
    },
}  # fmt: skip
"""What is known of each part of the config; anything else that is set is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The form of the weights that have scales in the checkpoint; those without stay as they are."""

    dtype: str
    """As safetensors names it: `I8` or `F8_E4M3`."""
    scale: str
    """Name of a weight's scales beside it: `weight_scale` or `weight_scale_inv`."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: an output, or the whole weight."""

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Quantisation | None:
        """Read `quantization_config` of a config.json; None if it has none.

        Raises:
            UnsupportedModelError: a form that is not served, or a field that is not known.
        """
        config = values.get("quantization_config")
        if config is None:
            return None
        if not isinstance(config, Mapping):
            raise _refused(where, "quantization_config", config)
        method = config.get("quant_method")
        if method not in ("fp8", "compressed-tensors"):
            raise _refused(where, "quant_method", method)
        _check_fields(config, method, where)
        if method == "compressed-tensors":
            return cls._of_groups(config, where)
        if config.get("fmt", "e4m3") != "e4m3":
            raise _refused(where, "fmt", config["fmt"])
        return cls(dtype="F8_E4M3", scale="weight_scale_inv", block=_sizes(config, "weight_block_size", where))

    @classmethod
    def _of_groups(cls, config: Mapping[str, Any], where: str) -> Quantisation:
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            raise _refused(where, "config_groups", groups)
        (group,) = groups.values()
        weights, inputs = (_part(group, name, where) for name in ("weights", "input_activations"))
        _check_fields(group, "group", where)
        _check_fields(weights, "weights", where)
        asked = {name: weights.get(name) for name in ("type", "num_bits", "strategy", "symmetric", "dynamic")}
        if group.get("targets") != ["Linear"] or asked["num_bits"] != 8 or asked["dynamic"] or not asked["symmetric"]:
            raise _refused(where, "config_groups", asked)
        if (group.get("format") or config.get("format")) != config.get("format"):
            raise _refused(where, "format", group["format"])
        if config.get("format") == "int-quantized" and asked["type"] == "int" and asked["strategy"] == "channel":
            _check_fields(inputs, "weights", where)
            of_inputs = {name: inputs.get(name) for name in ("type", "num_bits", "strategy", "dynamic")}
            of_inputs["symmetric"] = inputs.get("symmetric", True)
            if of_inputs != {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}:
                raise _refused(where, "input_activations", of_inputs)
            return cls(dtype="I8", scale="weight_scale")
        if config.get("format") == "float-quantized" and asked["type"] == "float":
            if asked["strategy"] in ("channel", "tensor"):
                return cls(dtype="F8_E4M3", scale="weight_scale")
            if asked["strategy"] == "block":
                return cls(dtype="F8_E4M3", scale="weight_scale", block=_sizes(weights, "block_structure", where))
        raise _refused(where, "format", {"format": config.get("format"), **asked})


def _part(group: object, name: str, where: str) -> Mapping[str, Any]:
    part = group.get(name) or {} if isinstance(group, Mapping) else None
    if not isinstance(part, Mapping):
        raise _refused(where, name, group)
    return part


def _check_fields(config: Mapping[str, Any], part: str, where: str) -> None:
    for name, value in config.items():
        if name not in _FIELDS[part] and value:
            raise _refused(where, name, value)


def _sizes(config: Mapping[str, Any], name: str, where: str) -> tuple[int, int]:
    sizes = config.get(name)
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise _refused(where, name, sizes)


def _refused(where: str, name: str, actual: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantised weights of this form are not served ({name})", where=where, expected=_SERVED,
        actual=str(actual)[:200],
    )  # fmt: skip
