"""Attention through block tables: K and V of a request lie in blocks anywhere in the pool.

Rows of requests with a single row (decoding ones, for the most part) are attended in one call, padded to the longest.

Shapes: T tokens, R requests with one row, C context tokens, N query heads, K KV heads, H head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference_engine.attention.limits import Limits
from reference_engine.attention.sdpa import attend_chunk, attend_single, first_key
from reference_engine.batch import Batch
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.kv_cache import CacheSpec, KVCache, context_slots

__all__ = ["PagedAttention", "PagedPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlan:
    """Where each request's keys are, worked out once for all layers of the same window."""

    window: int | None
    """Latest tokens that a row sees; None: all."""
    single_slots_RC: torch.Tensor
    """Slots of the requests with one row, padded with a slot of the null block."""
    single_mask_R11C: torch.Tensor | None
    """False on padding; None where all are equally long."""
    chunk_slots: list[torch.Tensor]
    """[C] slots of every other request, from the first that its first row sees."""


class PagedAttention:
    """Gather K and V through the block table, then torch's scaled dot-product attention."""

    limits = Limits()
    has_blocks = True

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.block_size
        self._layer_windows = spec.layer_windows
        self.num_blocks = spec.num_blocks or spec.default_num_blocks(spec.block_size)
        self.cache = KVCache(spec, self.num_blocks, self.block_size)

    def plan(self, batch: Batch) -> dict[int | None, PagedPlan]:
        """Turn the block tables into slots, for each window that some layer has."""
        return {window: self._plan(batch, window) for window in set(self._layer_windows)}

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan: PagedPlan = batch.plan[self._layer_windows[layer]]
        self.cache.store(layer, k_TKH, v_TKH, batch.slot_mapping_T)
        num_single = len(plan.single_slots_RC)
        contexts = [self._attend_single(layer, q_TNH[:num_single], plan)] if num_single else []
        q_chunks = torch.split(q_TNH[num_single:], batch.query_lens[num_single:])
        for q_chunk, slots_C in zip(q_chunks, plan.chunk_slots, strict=True):
            contexts.append(attend_chunk(q_chunk, *self.cache.gather(layer, slots_C), plan.window))
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_back`."""
        table_1B = torch.tensor([list(block_table)], device=self.cache.data.device)
        return self.cache.gather(layer, context_slots(table_1B, self.block_size, num_tokens)[0])

    def _plan(self, batch: Batch, window: int | None) -> PagedPlan:
        num_single = batch.num_single
        slots_RC, mask_R11C = self._plan_single(batch, num_single, window)
        return PagedPlan(
            window=window,
            single_slots_RC=slots_RC,
            single_mask_R11C=mask_R11C,
            chunk_slots=[self._chunk_slots(batch, i, window) for i in range(num_single, len(batch.query_lens))],
        )

    def _chunk_slots(self, batch: Batch, index: int, window: int | None) -> torch.Tensor:
        context_len = batch.context_lens[index]
        slots_1C = context_slots(batch.block_tables_RB[index : index + 1], self.block_size, context_len)
        return slots_1C[0, first_key(context_len, batch.query_lens[index], window) :]

    def _plan_single(
        self, batch: Batch, num_single: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        lens = batch.context_lens[:num_single]
        max_len = max(lens, default=0)
        tables_RB, lens_R = batch.block_tables_RB[:num_single], batch.context_lens_R[:num_single]
        if window is None or max_len <= window:
            max_keys, num_keys_R = max_len, lens_R
            slots_RC = context_slots(tables_RB, self.block_size, max_keys)
        else:
            max_keys, num_keys_R = window, lens_R.clamp(max=window)
            slots_RC = context_slots(tables_RB, self.block_size, max_keys, first_R=lens_R - num_keys_R)
        if min(lens, default=0) >= max_keys:
            return slots_RC, None
        is_key_RC = torch.arange(max_keys, device=slots_RC.device) < num_keys_R[:, None]
        # Behind a request's last token its block holds what somebody else left: read the null block's zeros instead.
        return slots_RC.masked_fill(~is_key_RC, NULL_BLOCK), is_key_RC[:, None, None]

    def _attend_single(self, layer: int, q_RNH: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        k, v = self.cache.gather(layer, plan.single_slots_RC.flatten())
        shape_RCKH = (*plan.single_slots_RC.shape, *k.shape[1:])
        return attend_single(q_RNH, k.view(shape_RCKH), v.view(shape_RCKH), plan.single_mask_R11C)
