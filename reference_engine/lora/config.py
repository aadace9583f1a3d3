"""The config of a LoRA adapter: PEFT's adapter_config.json, as PEFT 0.21 reads it.

Its fields name modules by regular expressions or by the ends of their paths, which differs from field to field. What is
not known here is refused unless it is null: many of PEFT's variants make another product of the same tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reference_engine.errors import ConfigError, UnsupportedModelError

__all__ = ["LoraConfig", "read_lora_config"]

_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "merge_weights", "peft_version", "qalora_group_size", "revision",
    "runtime_config",
}  # fmt: skip
"""Fields of training and of its start, and names; qalora_group_size says nothing without use_qalora."""
_SERVED: Mapping[str, tuple[object, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),  # others change the base weights
    "bias": ("none",),
    "task_type": (None, "CAUSAL_LM"),
    **dict.fromkeys(
        ("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), (None, False)
    ),
}  # fmt: skip


_T = TypeVar("_T")


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e300  # type: ignore[operator]


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_regex(value: object, inside: str = "{}") -> bool:
    """Whether a text is a regular expression where it is put into another."""
    try:
        return isinstance(value, str) and bool(re.compile(inside.format(value)))
    except (re.error, OverflowError, RecursionError):
        return False


def _is_table(value: object, is_sound: Callable[[object], bool]) -> bool:
    """Whether an object has such values, by regular expressions for the ends of paths."""
    return isinstance(value, dict) and all(_is_regex(key, _END) and is_sound(item) for key, item in value.items())


def _are_layers(value: object) -> bool:
    return all(type(item) is int for item in (value if isinstance(value, list) else [value]))


def _are_layer_names(value: object) -> bool:
    return all(_is_regex(item, _LAYER) for item in (value if isinstance(value, list) else [value]))


_END, _LAYER, _ANY_LAYER = r"(.*\.)?({})$", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.", r".*?\.[^.]*\.(?P<idx>\d+)\."
_REQUIRED = ("r", "lora_alpha", "target_modules")
_READ: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda value: value == "LORA", "LORA"),
    "r": (_is_rank, "an integer above 0"),
    "lora_alpha": (_is_alpha, "a number above 0"),
    "use_rslora": (lambda value: type(value) is bool, "true or false"),
    "rank_pattern": (lambda value: value is None or _is_table(value, _is_rank), "integers above 0 by regex"),
    "alpha_pattern": (lambda value: value is None or _is_table(value, _is_alpha), "numbers above 0 by regex"),
    "target_modules": (lambda value: _is_regex(value) or _are_names(value), "a regex or a list of names"),
    "exclude_modules": (
        lambda value: value is None or _is_regex(value) or _are_names(value), "a regex or a list of names",
    ),
    "layers_to_transform": (lambda value: value is None or _are_layers(value), "an integer, or several"),
    "layers_pattern": (lambda value: value is None or _are_layer_names(value), "a regex, or several"),
}  # fmt: skip
"""What each field that is read may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Which modules an adapter changes, with which ranks and scales."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]
    """Ranks of modules whose path ends with what a regular expression fits."""
    alphas: Mapping[str, float]
    targets: str | Sequence[str]
    """A regular expression for whole paths, or ends of paths."""
    excluded: str | Sequence[str]
    layers: Sequence[int]
    """The only layers that are changed; all where there are none."""
    layer_names: Sequence[str]
    """Regular expressions for what stands before a layer's number."""

    @property
    def changes_all_linear(self) -> bool:
        """Whether all linear layers but the head are changed."""
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"

    def changes(self, module: str) -> bool:
        """Whether a module, which is a linear layer where all of these are changed, gets an update."""
        if self.excluded and _fits(self.excluded, module):
            return False
        if self.changes_all_linear:
            return module != "lm_head"
        if not _fits(self.targets, module):
            return False
        is_named_whole = isinstance(self.targets, str) or module in self.targets
        return is_named_whole or not self.layers or self._layer(module) in self.layers

    def rank_of(self, module: str) -> int:
        """Return a module's rank."""
        return _first(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return alpha / r of a module; alpha / sqrt(r) for rank-stabilised LoRA (Kalajdzievski 2023)."""
        alpha, rank = _first(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def _layer(self, module: str) -> int | None:
        """Return the number of a module's layer: the first that stands after one of the names."""
        for expression in map(_LAYER.format, self.layer_names) if self.layer_names else (_ANY_LAYER,):
            match = re.match(expression, module)
            if match:
                return None if match["idx"] is None else int(match["idx"])
        return None


def _fits(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return any(f".{module}".endswith(f".{name}") for name in names)


def _first(patterns: Mapping[str, _T], module: str, default: _T) -> _T:
    for expression, value in patterns.items():
        if re.match(_END.format(expression), module):
            return value
    return default


def read_lora_config(path: Path) -> LoraConfig:
    """Read an adapter's config.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds an impossible value.
        UnsupportedModelError: it is no LoRA, or says what this engine does not serve.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the adapter's config cannot be read: {error}", where=path) from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        actual = fields.get("peft_type") if isinstance(fields, dict) else type(fields).__name__
        raise UnsupportedModelError("the adapter is no LoRA", where=path, expected="peft_type LORA", actual=actual)
    _check_fields(fields, path)
    layers, names = fields.get("layers_to_transform"), fields.get("layers_pattern")
    if isinstance(fields["target_modules"], str) and not layers is names is None:
        raise ConfigError("layers_to_transform and layers_pattern need target_modules to be a list", where=path)
    if names and layers is None:
        raise ConfigError("layers_pattern needs layers_to_transform", where=path)
    return LoraConfig(
        rank=fields["r"],
        alpha=fields["lora_alpha"],
        is_rank_stabilised=fields.get("use_rslora", False),
        ranks=fields.get("rank_pattern") or {},
        alphas=fields.get("alpha_pattern") or {},
        targets=fields["target_modules"],
        excluded=fields.get("exclude_modules") or (),
        layers=[layers] if isinstance(layers, int) else layers or (),
        layer_names=[names] if isinstance(names, str) and names else names or (),
    )


def _check_fields(fields: Mapping[str, Any], path: Path) -> None:
    for name, (is_sound, expected) in _READ.items():
        value = fields.get(name)
        if not is_sound(value) and (name in fields or name in _REQUIRED):
            raise ConfigError(f"{name} is impossible", where=path, expected=expected, actual=_shown(value))
    for name in fields.keys() - _READ.keys() - _WITHOUT_EFFECT:
        served = _SERVED.get(name, (None, []))
        if not any(type(fields[name]) is type(item) and fields[name] == item for item in served):
            expected = " or ".join(map(json.dumps, served))
            what = f"{name} is not served"
            raise UnsupportedModelError(what, where=path, expected=expected, actual=_shown(fields[name]))


def _shown(value: object) -> str:
    return "an integer of many digits" if type(value) is int and abs(value) >= 1 << 64 else str(value)[:80]
