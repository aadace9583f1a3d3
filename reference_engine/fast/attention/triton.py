"""Attention by Triton kernels: the paged backend's cache and block tables, with no gathered copies of K and V.

Rows of requests with a single row go to the decode kernel, all others to the prefill kernel. Each of the two returns
the same bits for a row whatever else is in the batch. Times on an H200 are in reports/h200/engine.md.

Triton is imported when this backend is opened, not before.

Shapes: T tokens, M prefill tiles, N query heads, K KV heads, H head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.fast.attention.limits import KernelLimits
from reference_engine.fast.kernels.tiling import MAX_HEAD_DIM, find_tiling
from reference_engine.kv_cache import KVCache, context_slots

__all__ = ["TritonAttention", "TritonPlan"]


_LEAST_E4M3 = 8, 9
"""Compute capability of the GPUs that have float8_e4m3fn."""


class TritonLimits(KernelLimits):
    """Any block size; heads up to 256 wide; CUDA, or the CPU under Triton's interpreter."""

    __slots__ = ()

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """See `KernelLimits.refusals`; this also looks at what is installed."""
        refusals = super().refusals(spec)
        if spec.head_dim > MAX_HEAD_DIM:
            refusals.append((f"head_dim at most {MAX_HEAD_DIM}", str(spec.head_dim)))
        if spec.device.type == "cuda" and spec.stored_dtype == torch.float8_e4m3fn:
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < _LEAST_E4M3:  # Triton cannot convert it: the kernel would not compile
                least = ".".join(map(str, _LEAST_E4M3))
                refusals.append(
                    (f"compute capability {least} for a cache in float8_e4m3fn", ".".join(map(str, capability)))
                )
        if find_spec("triton") is None:
            refusals.append(("the package triton (pip install triton)", "no such package"))
        elif spec.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            refusals.append(("device cuda, or the environment variable TRITON_INTERPRET=1", spec.device.type))
        return refusals


_LIMITS = TritonLimits(stores_float8=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """The division of the step's rows, for all layers."""

    num_single: int
    """Leading requests with one row."""
    tiles_M4: torch.Tensor
    """int32: see `kernels.paged_prefill.cut_into_tiles`."""


class TritonAttention:
    """Read K and V through the block table inside the kernel."""

    limits = _LIMITS
    has_blocks = True

    def __init__(self, spec: CacheSpec) -> None:
        from reference_engine.fast import triton_operators as operators
        from reference_engine.fast.kernels.paged_prefill import cut_into_tiles

        self.block_size = spec.block_size
        self.num_blocks = spec.num_blocks or spec.default_num_blocks(spec.block_size)
        self.cache = KVCache(spec, self.num_blocks, self.block_size)
        self._layer_windows = spec.layer_windows
        self._tiling = find_tiling(spec.head_dim, spec.dtype)
        self._cut_into_tiles = cut_into_tiles
        self.operators: Any = operators

    def plan(self, batch: Batch) -> TritonPlan:
        """Cut the chunks into tiles, on the host."""
        num_single = batch.num_single
        tiles = self._cut_into_tiles(batch.query_lens, batch.context_lens, self._tiling.rows, first_request=num_single)
        return TritonPlan(num_single=num_single, tiles_M4=_to_device(tiles, self.cache.data.device))

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan: TritonPlan = batch.plan
        k_cache_BSKH, v_cache_BSKH = self.cache.data[:, layer]
        k_scale, v_scale = self.cache.scales[layer]
        options = {"window": self._layer_windows[layer], "k_scale": k_scale, "v_scale": v_scale}
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        with torch.cuda.device_of(q_TNH):  # Triton launches on the current device, which need not be this one
            self.operators.store_kv(
                k_TKH, v_TKH, batch.slot_mapping_T, k_cache_BSKH, v_cache_BSKH, k_scale=k_scale, v_scale=v_scale
            )
            if plan.num_single:
                rows = slice(plan.num_single)
                self.operators.paged_decode(
                    q_TNH[rows], k_cache_BSKH, v_cache_BSKH, batch.block_tables_RB[rows], batch.context_lens_R[rows],
                    out_TNH[rows], **options,
                )  # fmt: skip
            if len(plan.tiles_M4):
                self.operators.paged_prefill(
                    q_TNH, k_cache_BSKH, v_cache_BSKH, batch.block_tables_RB, plan.tiles_M4, out_TNH, **options
                )
        return out_TNH

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_back`."""
        table_1B = torch.tensor([list(block_table)], device=self.cache.data.device)
        return self.cache.gather(layer, context_slots(table_1B, self.block_size, num_tokens)[0])


def _to_device(tiles: list[tuple[int, int, int, int]], device: torch.device) -> torch.Tensor:
    if (
        not tiles
    ):  # made there: a copy, even of nothing, may wait for the device, which a step that is recorded must not
        return torch.empty((0, 4), dtype=torch.int32, device=device)
    host = torch.tensor(tiles, dtype=torch.int32)
    # Only a copy from pinned memory is asynchronous.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
