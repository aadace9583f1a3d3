"""The limits of an attention backend that runs kernels, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from reference_engine.attention.limits import refusals_of_stored_dtype
from reference_engine.cache_spec import CacheSpec

__all__ = ["KernelLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLimits:
    """The shapes that a backend serves. The defaults are those of plain torch: everything."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    head_dims: tuple[int, ...] | None = None
    """None: any."""
    block_size_multiple: int = 1
    """Block sizes must be multiples of this."""
    device_types: tuple[str, ...] = ("cpu", "cuda")
    stores_float8: bool = False
    """Whether K and V may be stored as float8 with scales."""
    has_windows: bool = True
    """Whether a layer may see only the latest tokens."""

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """Return what is expected and what is found, of everything that the backend cannot serve."""
        refusals: list[tuple[str, str]] = []
        if spec.dtype not in self.dtypes:
            refusals.append((f"dtype {_listed(map(_name, self.dtypes))}", _name(spec.dtype)))
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            refusals.append((f"head_dim {_listed(self.head_dims)}", str(spec.head_dim)))
        if spec.block_size % self.block_size_multiple:
            refusals.append((f"block_size a multiple of {self.block_size_multiple}", str(spec.block_size)))
        if spec.device.type not in self.device_types:
            refusals.append((f"device {_listed(self.device_types)}", spec.device.type))
        if not self.has_windows and any(window is not None for window in spec.layer_windows):
            refusals.append(("no sliding window", str(max(window or 0 for window in spec.layer_windows))))
        if not self.stores_float8:
            refusals += refusals_of_stored_dtype(spec)
        if spec.value_dim is not None:
            refusals.append(("values beside their keys", "latents, which are both"))
        return refusals


def _listed(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
