"""The weights of a checkpoint that have scales, and the scales for the engine's parameters that they are stacked in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reference_engine.checkpoint.placement import Placement
from reference_engine.checkpoint.quantisation import Quantisation
from reference_engine.checkpoint.weights import TOKEN_EMBEDDING
from reference_engine.errors import CheckpointError, ConfigError

__all__ = ["QuantisedTensors"]

_DTYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
_OF_INPUTS = (".input_scale",)
"""Of inputs that stand still: weights in float8 are multiplied by inputs as they are."""


@dataclass(frozen=True, slots=True)
class QuantisedTensors:
    """Which weights are quantised, and where their scales lie; nothing where the checkpoint has none."""

    quantisation: Quantisation | None = None
    weights: Mapping[str, Placement] = field(default_factory=dict)
    """By the checkpoint's names."""
    names: frozenset[str] = frozenset()
    """Tensors that belong to them."""
    source: Mapping[str, Any] = field(default_factory=dict)
    folder: str | Path = ""

    @classmethod
    def of(
        cls,
        quantisation: Quantisation | None,
        table: Mapping[str, Placement],
        source: Mapping[str, Any],
        folder: str | Path,
    ) -> QuantisedTensors:
        """Find the weights with scales.

        Raises:
            CheckpointError: dtypes, shapes or scales that do not fit, or a stack of which a part is quantised.
        """
        if quantisation is None:
            return cls()
        weights = {name: item for name, item in table.items() if _scale_of(name, quantisation) in source}
        stray = {
            name for name in source if name.endswith(_OF_INPUTS) and name.rpartition(".")[0] + ".weight" in weights
        }
        tensors = cls(
            quantisation,
            weights,
            frozenset({_scale_of(name, quantisation) for name in weights} | stray),
            source,
            folder,
        )
        tensors._check(table)
        return tensors

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the engine's parameters that are quantised."""
        if self.quantisation is None:
            return {}
        return {weight.parameter: _DTYPES[self.quantisation.dtype] for weight in self.weights.values()}

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse several ranks; raises ConfigError."""
        if self.weights and num_ranks > 1:
            raise ConfigError(
                "quantised weights are not shared among ranks", where=self.folder, expected=1, actual=num_ranks
            )

    def read_into(self, parameters: dict[str, torch.Tensor], device: torch.device) -> None:
        """Add the scales of each quantised parameter as `NAME_scale`: [outputs, blocks of inputs] float32."""
        parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for name, placement in self.weights.items():
            parts.setdefault(placement.parameter, []).append((placement.row, self._scale(name, placement)))
        for parameter, scales in parts.items():
            in_order = [scale for _, scale in sorted(scales, key=lambda named: named[0])]
            widest = max(scale.shape[1] for scale in in_order)
            parameters[f"{parameter}_scale"] = torch.cat(
                [scale.expand(len(scale), widest) for scale in in_order]
            ).to(device)  # fmt: skip

    def _scale(self, name: str, placement: Placement) -> torch.Tensor:
        """Return the scales of one weight, a row for each output."""
        assert self.quantisation is not None
        scale_name = _scale_of(name, self.quantisation)
        scale: torch.Tensor = self.source[scale_name].get_tensor(scale_name).to(torch.float32)
        (num_outputs, num_inputs), block = placement.shape, self.quantisation.block
        expected = [(num_outputs, 1), (num_outputs,), (1,), ()]
        if block is not None:
            expected = [(-(-num_outputs // block[0]), -(-num_inputs // block[1]))]
        if tuple(scale.shape) not in expected or not bool(((scale > 0) & (scale < math.inf)).all()):
            raise CheckpointError(
                f"scales of a quantised weight do not fit it: {scale_name}", where=self.folder,
                expected=f"positive numbers of shape {' or '.join(map(str, expected))}",
                actual=f"{list(scale.shape)}, from {float(scale.min()):g} to {float(scale.max()):g}",
            )  # fmt: skip
        if block is not None:
            return scale.repeat_interleave(block[0], dim=0)[:num_outputs]
        return scale.reshape(-1, 1).expand(num_outputs, 1)

    def _check(self, table: Mapping[str, Placement]) -> None:
        assert self.quantisation is not None
        for name, placement in self.weights.items():
            header = self.source[name].get_slice(name)
            header_values = tuple(header.get_shape()), header.get_dtype()
            if header_values != (placement.shape, self.quantisation.dtype):
                raise CheckpointError(
                    f"a quantised weight contradicts config.json: {name}", where=self.folder,
                    expected=f"{placement.shape} in {self.quantisation.dtype}",
                    actual=f"{header_values[0]} in {header_values[1]}",
                )  # fmt: skip
        quantised = {weight.parameter for weight in self.weights.values()}
        if TOKEN_EMBEDDING in quantised:
            raise CheckpointError(
                "a quantised embedding is not served", where=self.folder, expected=f"{TOKEN_EMBEDDING} without scales",
                actual=self.quantisation.dtype,
            )  # fmt: skip
        for name, placement in table.items():
            if placement.parameter in quantised and name not in self.weights:
                raise CheckpointError(
                    f"a weight without scales stands beside quantised ones: {name}", where=self.folder,
                    expected=_scale_of(name, self.quantisation), actual="none",
                )  # fmt: skip


def _scale_of(weight: str, quantisation: Quantisation) -> str:
    return f"{weight.removesuffix('.weight')}.{quantisation.scale}"
