"""Attention over one contiguous buffer a request: the cache that paging replaced, for comparison.

A request's buffer is one block as long as the longest request allowed, so the pool, the scheduler and the store are
those of the paged backend; only the way back is a plain slice.

Shapes: T tokens, C context tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_engine.attention.sdpa import attend_chunk
from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.kv_cache import KVCache

__all__ = ["ContiguousAttention"]


class ContiguousAttention:
    """Slice K and V out of the request's own buffer, then torch's scaled dot-product attention."""

    limits = None
    has_blocks = False

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.max_model_len
        self._layer_windows, self._scaling = spec.layer_windows, spec.scaling
        self.num_blocks = spec.default_num_blocks(self.block_size)
        self.cache = KVCache(spec, self.num_blocks, self.block_size)

    def plan(self, batch: Batch) -> None:
        """Nothing is shared between layers."""

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self.cache.store(layer, k_TKH, v_TKH, batch.slot_mapping_T)
        q_chunks, window = torch.split(q_TNH, batch.query_lens), self._layer_windows[layer]
        return torch.cat(
            [
                attend_chunk(q_chunk, *self.read_back(layer, table, context_len), window, **self._scaling)
                for q_chunk, table, context_len in zip(q_chunks, batch.block_tables, batch.context_lens, strict=True)
            ]
        )

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend.read_back`; these are views."""
        return self.cache.first(layer, block_table[0], num_tokens)
