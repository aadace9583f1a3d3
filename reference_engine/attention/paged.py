"""Attention through block tables: K and V of a request lie in blocks anywhere in the pool.

Rows of requests with a single row (decoding ones, for the most part) are attended in one call, padded to the longest.

Shapes: T tokens, R requests with one row, C context tokens, N query heads, K KV heads, H head dim.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from reference_engine.attention.limits import Limits
from reference_engine.attention.sdpa import attend_chunk, attend_single, first_key
from reference_engine.batch import Batch
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.cache_spec import CacheSpec
from reference_engine.kv_cache import KVCache, context_slots

__all__ = ["PagedAttention", "PagedPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleBlocks:
    """Whole blocks with the keys of requests with one row that see their whole past."""

    tables_RB: torch.Tensor
    max_len: int
    """Keys of the longest request."""
    padding: torch.Tensor | None
    """Places in [R, B, S], flattened, after the ends of shorter requests; None if all are equally long."""
    mask_R11C: torch.Tensor | None
    """False on padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleSlots:
    """Slots with the keys of requests with one row that see a window, which begins anywhere in a block."""

    slots_RC: torch.Tensor
    """Padded with a slot of the null block."""
    mask_R11C: torch.Tensor | None
    """False on padding; None if all are equally long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlan:
    """The places of each request's keys, worked out once for all layers of the same window."""

    window: int | None
    """Latest tokens that a row sees; None: all."""
    single: SingleBlocks | SingleSlots | None
    """Those of the requests with one row."""
    chunk_slots: list[torch.Tensor]
    """[C] slots of every other request, from the first that its first row sees."""


class PagedAttention:
    """Gather K and V through the block table, then torch's scaled dot-product attention."""

    limits: ClassVar[Limits | None] = None
    has_blocks = True

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.block_size
        self._layer_windows, self._scaling = spec.layer_windows, spec.scaling
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
        num_single = batch.num_single
        contexts = [] if plan.single is None else [self._attend_single(layer, q_TNH[:num_single], plan.single)]
        q_chunks = torch.split(q_TNH[num_single:], batch.query_lens[num_single:])
        for q_chunk, slots_C in zip(q_chunks, plan.chunk_slots, strict=True):
            k_CKH, v_CKH = self.cache.gather(layer, slots_C)
            contexts.append(attend_chunk(q_chunk, k_CKH, v_CKH, plan.window, **self._scaling))
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_back`."""
        table_1B = torch.tensor([list(block_table)], device=self.cache.data.device)
        return self.cache.gather(layer, context_slots(table_1B, self.block_size, num_tokens)[0])

    def _plan(self, batch: Batch, window: int | None) -> PagedPlan:
        num_single = batch.num_single
        return PagedPlan(
            window=window,
            single=self._plan_single(batch, num_single, window) if num_single else None,
            chunk_slots=[self._chunk_slots(batch, i, window) for i in range(num_single, len(batch.query_lens))],
        )

    def _chunk_slots(self, batch: Batch, index: int, window: int | None) -> torch.Tensor:
        context_len = batch.context_lens[index]
        slots_1C = context_slots(batch.block_tables_RB[index : index + 1], self.block_size, context_len)
        return slots_1C[0, first_key(context_len, batch.query_lens[index], window) :]

    def _plan_single(self, batch: Batch, num_single: int, window: int | None) -> SingleBlocks | SingleSlots:
        lens = batch.context_lens[:num_single]
        tables_RB, lens_R = batch.block_tables_RB[:num_single], batch.context_lens_R[:num_single]
        if window is None or max(lens) <= window:
            return self._whole_past(tables_RB, lens_R, lens)
        num_keys_R = lens_R.clamp(max=window)
        slots_RC = context_slots(tables_RB, self.block_size, window, first_R=lens_R - num_keys_R)
        if min(lens) >= window:
            return SingleSlots(slots_RC=slots_RC, mask_R11C=None)
        is_key_RC = torch.arange(window, device=slots_RC.device) < num_keys_R[:, None]
        # After a request's last token its block holds old content: read the null block's zeros instead.
        slots_RC = slots_RC.masked_fill(~is_key_RC, NULL_BLOCK)
        return SingleSlots(slots_RC=slots_RC, mask_R11C=is_key_RC[:, None, None])

    def _whole_past(self, tables_RB: torch.Tensor, lens_R: torch.Tensor, lens: Sequence[int]) -> SingleBlocks:
        max_len = max(lens)
        tables_RB = tables_RB[:, : -(-max_len // self.block_size)]
        padding, mask_R11C = None, None
        if min(lens) < max_len:
            is_key_RC = torch.arange(max_len, device=lens_R.device) < lens_R[:, None]
            mask_R11C = is_key_RC[:, None, None]
            padding = self._padding(lens, tables_RB)
        return SingleBlocks(tables_RB=tables_RB, max_len=max_len, padding=padding, mask_R11C=mask_R11C)

    def _padding(self, lens: Sequence[int], tables_RB: torch.Tensor) -> torch.Tensor:
        """Return the places after each request's end in its last block; further blocks are the null block's zeros."""
        lens_R = np.array(lens)
        gaps_R = -lens_R % self.block_size
        ends_R = np.arange(len(lens)) * tables_RB.shape[1] * self.block_size + lens_R
        # Each request's places count up from its end; those before it in the result belong to other requests.
        places = np.repeat(ends_R - np.cumsum(gaps_R) + gaps_R, gaps_R) + np.arange(gaps_R.sum())
        device = tables_RB.device
        host = torch.from_numpy(places)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def _attend_single(self, layer: int, q_RNH: torch.Tensor, single: SingleBlocks | SingleSlots) -> torch.Tensor:
        if isinstance(single, SingleBlocks):
            k_RCKH, v_RCKH = self._gather_blocks(layer, single)
        else:
            k, v = self.cache.gather(layer, single.slots_RC.flatten())
            shape_RCKH = (*single.slots_RC.shape, *k.shape[1:])
            k_RCKH, v_RCKH = k.view(shape_RCKH), v.view(shape_RCKH)
        return attend_single(q_RNH, k_RCKH, v_RCKH, single.mask_R11C, **self._scaling)

    def _gather_blocks(self, layer: int, single: SingleBlocks) -> tuple[torch.Tensor, torch.Tensor]:
        num_requests = len(single.tables_RB)
        k, v = (x.flatten(0, 1) for x in self.cache.gather_blocks(layer, single.tables_RB.flatten()))
        if single.padding is not None:
            # There it holds old content, which may be NaN, and 0 * NaN is NaN.
            k.index_fill_(0, single.padding, 0)
            v.index_fill_(0, single.padding, 0)
        k_RCKH, v_RCKH = (x.unflatten(0, (num_requests, -1))[:, : single.max_len] for x in (k, v))
        return k_RCKH, v_RCKH
