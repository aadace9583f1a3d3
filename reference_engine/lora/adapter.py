"""LoRA adapters (Hu et al. 2021) in PEFT's format, served beside the base model without merging.

A request names its adapter; every linear product of its rows gets scaling * B (A x) added (equation 3). Rows of several
adapters and of none share a batch: the base product is one for all, each adapter adds to its own rows.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import linear

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.weights import Placement, weight_table
from reference_engine.errors import CheckpointError
from reference_engine.lora.config import LoraConfig, read_lora_config

__all__ = ["Adapter", "LowRank", "read_adapter", "rows_by_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ADAPTED = re.compile(r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)\.weight")
"""The engine's products that adapters add to; a router and its experts are none."""
_SIDES = (".lora_A.weight", ".lora_B.weight")


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
        """Return [T, O], rounded as PEFT rounds: after A, after B, and scaled."""
        return linear(linear(x_TI, self.a_RI), self.b_OR) * self.scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """All that one adapter adds, by the engine's products."""

    name: str
    updates: Mapping[str, tuple[LowRank, ...]]
    """By the product's name: `model.layers.0.self_attn.qkv_proj`."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by their paths."""
        tensors: dict[str, torch.Tensor] = {}
        for update in (update for updates in self.updates.values() for update in updates):
            tensors |= {f"{update.name}.lora_A": update.a_RI, f"{update.name}.lora_B": update.b_OR}
        return tensors

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


def rows_by_adapter(
    adapters: Mapping[str, Adapter], names: Sequence[str | None], requests_T: np.ndarray, device: torch.device
) -> Sequence[tuple[Adapter, torch.Tensor]]:
    """Return the adapters of a step, each with its rows, int64; `names` are those of its requests."""
    rows = []
    for name in sorted({name for name in names if name is not None}):
        has_adapter_R = np.array([asked == name for asked in names])
        rows_T = torch.from_numpy(np.flatnonzero(has_adapter_R[requests_T])).to(device)
        rows.append((adapters[name], rows_T))
    return rows


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
    settings = read_lora_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    tensors = _read_tensors(path)
    adapted = {key.removesuffix(side) for key in tensors for side in _SIDES if key.endswith(side)}
    if not adapted:
        raise CheckpointError("the adapter has no weights", where=path)
    places = {parameter.removesuffix(".weight"): place for parameter, place in weight_table(config).items()}
    updates: dict[str, list[LowRank]] = {}
    for module in sorted(adapted):
        place = places.get(module)
        if place is None or not _ADAPTED.fullmatch(place.parameter):
            raise CheckpointError(
                "the adapter changes a module that is no linear layer of the model", where=path,
                expected="q, k, v, o, gate, up and down projections", actual=module,
            )  # fmt: skip
        a_RI, b_OR = (tensor.to(device, dtype) for tensor in _pair(tensors, module, place, path))
        _check_rank(settings, module, len(a_RI), path)
        update = LowRank(
            name=module,
            first_output=place.row,
            a_RI=a_RI,
            b_OR=b_OR,
            scaling=settings.scaling_of(module),
        )
        updates.setdefault(place.parameter.removesuffix(".weight"), []).append(update)
    _check_targets(settings, places, adapted, path)
    return Adapter(name=name, updates={product: tuple(parts) for product, parts in updates.items()})


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


def _check_rank(settings: LoraConfig, module: str, rank: int, path: Path) -> None:
    if rank != settings.rank_of(module):
        raise CheckpointError(
            "the adapter's rank is not the one that its config states", where=f"{path}: {module}",
            expected=settings.rank_of(module), actual=rank,
        )  # fmt: skip


def _check_targets(settings: LoraConfig, places: Mapping[str, Placement], adapted: Collection[str], path: Path) -> None:
    """Refuse an adapter whose weights are not those of the modules that its config names, all and no others."""
    for module in sorted(adapted):
        if not settings.changes(module):
            what = "the adapter has weights of a module that its config does not target"
            raise CheckpointError(what, where=path, actual=module)
    if settings.changes_all_linear:
        modules = {module for module, place in places.items() if _ADAPTED.fullmatch(place.parameter)}
    else:
        modules = {module for name in places for module in accumulate(name.split("."), "{}.{}".format)} | {"lm_head"}
    for module in sorted(modules.difference(adapted)):
        if settings.changes(module):
            what = "the adapter's config targets a module that it has no weights for"
            raise CheckpointError(what, where=path, expected=module)
