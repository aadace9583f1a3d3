"""A small configuration of any architecture, by rule: sizes by field name, one layer of each type, 2 to 4 in all."""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from harness.extensions.faults.zoo.sizes import EXCEPTIONS, MAY_BE_NONE, SIZES


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return a small configuration of `model_type`, its text configuration if it has several.

    `changes` replace entries of SIZES, for engines that serve some sizes only.

    Raises:
        Exception: what the configuration's class raises, if the sizes do not fit it.
    """
    default = AutoConfig.for_model(model_type).get_text_config()
    sizes = SIZES | dict(changes or {})
    fields = (
        sizes_of(type(default), sizes)
        | parts_of(default, sizes)
        | one_layer_of_each_type(default)
        | EXCEPTIONS.get(model_type, {})
    )
    return type(default)(**fields)


def sizes_of(kind: type[PreTrainedConfig], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known sizes that a configuration class has as a field."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    sizes = {name: size for name, size in known.items() if name in defaults}
    sizes = {name: size for name, size in sizes.items() if is_number(defaults[name]) or name in MAY_BE_NONE}
    if "kv_lora_rank" in sizes:  # every head has keys of its own, and their size is the sum of two others
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    return sizes


def parts_of(default: PreTrainedConfig, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return small sizes for the configurations inside a configuration (attention, local encoder, ...)."""
    parts = {name: sizes_of(type(getattr(default, name)), known) for name in default.sub_configs}
    return {name: sizes for name, sizes in parts.items() if sizes}


def one_layer_of_each_type(default: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields with an entry a layer, cut to one layer of each distinct row, in their order."""
    num_layers = getattr(default, "num_hidden_layers", None)
    columns = {name: value for name, value in default.to_dict().items() if is_per_layer(value, num_layers)}
    if not columns:
        return {}
    rows = list(dict.fromkeys(zip(*columns.values(), strict=True)))
    rows = [*rows, rows[-1]][: max(2, len(rows))]
    fields = {name: [row[at] for row in rows] for at, name in enumerate(columns)}
    return fields | {"num_hidden_layers": len(rows)}


def is_per_layer(value: Any, num_layers: int | None) -> bool:
    """Tell a list with one entry a layer; a rising list of numbers holds the indices of layers."""
    if not isinstance(value, list) or len(value) != num_layers:
        return False
    return not (is_number(value[0]) and all(a < b for a, b in pairwise(value)))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
