"""LoRA adapters (Hu et al. 2021) in PEFT's format, served beside the base model without merging.

A request names its adapter; every linear product of its rows gets scaling * B (A x) added (equation 3). Rows of several
adapters and of none share a batch: the base product is one for all, each adapter adds to its own rows.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import linear

from reference_engine.config import ModelConfig
from reference_engine.errors import CheckpointError, ConfigError, UnsupportedModelError
from reference_engine.weights import Placement, weight_table

__all__ = ["Adapter", "LowRank", "read_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ADAPTED = re.compile(r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)\.weight")
"""The engine's products that adapters add to; a router and its experts are none."""
_SIDES = (".lora_A.weight", ".lora_B.weight")
_UNSERVED = ("use_dora", "fan_in_fan_out", "modules_to_save", "layers_pattern", "lora_bias", "trainable_token_indices")
"""Fields that make another product of the same tensors, and are served if they are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The update of one adapter to one linear layer."""

    name: str
    """The layer's module in the checkpoint."""
    first_output: int
    """The first of its outputs in the engine's product, in which several layers may be stacked."""
    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scaling: float

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return [T, O], rounded as PEFT rounds: behind A, behind B, and scaled."""
        return linear(linear(x_TI, self.a_RI), self.b_OR) * self.scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """All that one adapter adds, by the engine's products."""

    name: str
    updates: Mapping[str, tuple[LowRank, ...]]
    """By the product's name: `model.layers.0.self_attn.qkv_proj`."""

    def add(self, product: str, rows_T: torch.Tensor, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Add to some rows of a product's result, in place.

        Args:
            product: its name.
            rows_T: int64, the rows that are this adapter's.
            x_TI: the product's input.
            y_TO: the base product's result.
        """
        updates = self.updates.get(product, ())
        if updates:
            own_TI = x_TI.index_select(0, rows_T)
        for update in updates:
            outputs = slice(update.first_output, update.first_output + len(update.b_OR))
            y_TO[:, outputs] = y_TO[:, outputs].index_add(0, rows_T, update(own_TI))


def read_adapter(
    name: str, folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Read an adapter that PEFT has saved.

    Raises:
        ConfigError: adapter_config.json is missing, is not JSON, or holds an impossible value.
        UnsupportedModelError: it is no LoRA, or a variant with other products.
        CheckpointError: the weights are missing or damaged, or do not fit the model or the ranks.
    """
    folder = Path(folder)
    settings = _read_settings(folder / CONFIG_FILE)
    table = {parameter.removesuffix(".weight"): place for parameter, place in weight_table(config).items()}
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    updates: dict[str, list[LowRank]] = {}
    for module in sorted({key.removesuffix(side) for key in tensors for side in _SIDES if key.endswith(side)}):
        place = table.get(module)
        if place is None or not _ADAPTED.fullmatch(place.parameter):
            raise CheckpointError(
                "the adapter changes a module that is no linear layer of the model", where=folder / WEIGHTS_FILE,
                expected="q, k, v, o, gate, up and down projections", actual=module,
            )  # fmt: skip
        pair = _pair(tensors, module, place, folder / WEIGHTS_FILE)
        rank = len(pair[0])
        _check_rank(settings, module, rank, folder)
        a_RI, b_OR = (tensor.to(device, dtype) for tensor in pair)
        update = LowRank(
            name=module,
            first_output=place.row,
            a_RI=a_RI,
            b_OR=b_OR,
            scaling=_scaling(settings, module, rank),
        )
        updates.setdefault(place.parameter.removesuffix(".weight"), []).append(update)
    if not updates:
        raise CheckpointError("the adapter has no weights", where=folder / WEIGHTS_FILE)
    return Adapter(name=name, updates={product: tuple(own) for product, own in updates.items()})


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter's config cannot be read: {error}", where=path) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        actual = settings.get("peft_type") if isinstance(settings, dict) else settings
        raise UnsupportedModelError("the adapter is no LoRA", where=path, expected="peft_type LORA", actual=actual)
    for field in _UNSERVED:
        if settings.get(field):
            raise UnsupportedModelError(
                f"{field} is not served", where=path, expected="none", actual=str(settings[field])[:80]
            )
    if settings.get("bias", "none") != "none":
        raise UnsupportedModelError("biases of adapters are not served", where=path, actual=settings["bias"])
    for field in ("r", "lora_alpha"):
        value = settings.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{field} is impossible", where=path, expected="a number above 0", actual=value)
    return settings


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by the module's name in the checkpoint and `.lora_A.weight` or `.lora_B.weight`."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the adapter's weights cannot be read: {error}", where=path) from error
    for key in tensors:
        if not key.startswith(_PREFIX) or not key.endswith(_SIDES):
            raise CheckpointError(
                "the adapter has a tensor that is no part of a LoRA", where=path,
                expected=f"{_PREFIX}MODULE.lora_A.weight and .lora_B.weight", actual=key,
            )  # fmt: skip
    return {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}


def _pair(
    tensors: Mapping[str, torch.Tensor], module: str, place: Placement, path: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of a module, whose shapes fit each other and the layer."""
    a, b = (tensors.get(module + side) for side in _SIDES)
    if a is None or b is None:
        missing = _SIDES[0] if a is None else _SIDES[1]
        raise CheckpointError("the adapter has one of two tensors", where=path, expected=module + missing)
    num_outputs, num_inputs = place.shape
    if a.dim() != 2 or b.dim() != 2 or a.shape != (b.shape[1], num_inputs) or b.shape[0] != num_outputs:
        raise CheckpointError(
            "the adapter's tensors do not fit the layer", where=f"{path}: {module}",
            expected=f"A [rank, {num_inputs}], B [{num_outputs}, rank]",
            actual=f"A {list(a.shape)}, B {list(b.shape)}",
        )  # fmt: skip
    return a, b


def _check_rank(settings: Mapping[str, Any], module: str, rank: int, folder: Path) -> None:
    stated = _own(settings, "rank_pattern", module, settings["r"])
    if rank != stated:
        raise CheckpointError(
            "the adapter's rank is not the one that its config states", where=f"{folder / WEIGHTS_FILE}: {module}",
            expected=stated, actual=rank,
        )  # fmt: skip


def _scaling(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / r; alpha / sqrt(r) for rank-stabilised LoRA (Kalajdzievski 2023)."""
    alpha = float(_own(settings, "alpha_pattern", module, settings["lora_alpha"]))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _own(settings: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    """Return what a pattern says of a module: its keys are ends of module names."""
    patterns = settings.get(pattern) or {}
    return next((value for key, value in patterns.items() if module == key or module.endswith(f".{key}")), default)
