"""Attention by C++ kernels on a CPU: rows of decoding requests read K and V where they lie, through the block table.

Everything else is the paged backend's. The kernels are compiled when this backend is first opened on a machine.

Shapes: T tokens, R requests with one row, C context tokens, N query heads, K KV heads, H head dim, B blocks.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from reference_engine.attention.paged import PagedAttention
from reference_engine.attention.sdpa import attend_chunk
from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.fast.attention.limits import KernelLimits
from reference_engine.fast.cpp_operators import find_compiler, load_operators

__all__ = ["CppAttention", "CppPlan"]


class CppLimits(KernelLimits):
    """A CPU, with a compiler."""

    __slots__ = ()

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """See `KernelLimits.refusals`; this also looks for the compiler."""
        refusals = super().refusals(spec)
        if not find_compiler():
            refusals.append(("a C++ compiler (c++, g++, clang++ or the variable CXX)", "none"))
        return refusals


_LIMITS = CppLimits(device_types=("cpu",))


@dataclass(frozen=True, slots=True, kw_only=True)
class CppPlan:
    """The division of the step's rows, for all layers."""

    num_single: int
    """Leading requests with one row."""
    tables_RB: torch.Tensor
    """Their blocks."""
    context_lens_R: torch.Tensor
    chunk_slots: dict[int | None, list[torch.Tensor]]
    """[C] slots of every other request, from the first that its first row sees, for each window that some layer has."""


class CppAttention(PagedAttention):
    """Read K and V of requests with one row inside the kernel; gather those of the others."""

    limits = _LIMITS
    operators: Any

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.operators = load_operators()
        self._caches = [self.cache.data[:, layer].unbind() for layer in range(spec.num_layers)]

    def plan(self, batch: Batch) -> Any:
        """Find the slots of the chunks."""
        num_single = batch.num_single
        chunks = range(num_single, len(batch.query_lens))
        return CppPlan(
            num_single=num_single,
            tables_RB=batch.block_tables_RB[:num_single],
            context_lens_R=batch.context_lens_R[:num_single],
            chunk_slots={
                window: [self._chunk_slots(batch, index, window) for index in chunks]
                for window in set(self._layer_windows)
            },
        )

    def layer_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of a layer, [blocks, slots, K, H] each."""
        k_cache_BSKH, v_cache_BSKH = self._caches[layer]
        return k_cache_BSKH, v_cache_BSKH

    def window(self, layer: int) -> int | None:
        """Return the latest tokens that a row of a layer sees; None for all."""
        return self._layer_windows[layer]

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan: CppPlan = batch.plan
        window, num_single = self._layer_windows[layer], plan.num_single
        k_cache_BSKH, v_cache_BSKH = self._caches[layer]
        self.operators.store_kv(k_TKH, v_TKH, batch.slot_mapping_T, k_cache_BSKH, v_cache_BSKH)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        if num_single:
            # The kernel takes a row for each context length: those after the single ones are left as they are.
            self.operators.paged_decode(
                q_TNH, k_cache_BSKH, v_cache_BSKH, plan.tables_RB, plan.context_lens_R, out_TNH, window=window
            )
        if num_single < len(q_TNH):
            rows = batch.query_lens[num_single:]
            chunks = zip(q_TNH[num_single:].split(rows), out_TNH[num_single:].split(rows), strict=True)
            for (q, out), slots_C in zip(chunks, plan.chunk_slots[window], strict=True):
                out.copy_(attend_chunk(q, *self.cache.gather(layer, slots_C), window))
        return out_TNH
