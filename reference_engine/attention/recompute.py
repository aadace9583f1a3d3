"""Attention without a cache: every step computes all tokens of its requests again.

Slow, and the plainest statement of what the other backends must equal.

Shapes: T tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_engine.attention.limits import CacheLimits
from reference_engine.attention.sdpa import attend_chunk
from reference_engine.batch import Batch
from reference_engine.cache_spec import CacheSpec
from reference_engine.errors import EngineError

__all__ = ["RecomputeAttention"]


class RecomputeAttention:
    """Attend to this step's own K and V, which are those of the whole prefix."""

    cache = None
    limits = CacheLimits()
    has_blocks = False

    def __init__(self, spec: CacheSpec) -> None:
        # The pool counts requests only: one "block" each, and no memory behind it.
        self.block_size = spec.max_model_len
        self._layer_windows, self._scaling = spec.layer_windows, spec.scaling
        self.num_blocks = 1 + spec.max_num_seqs

    def plan(self, batch: Batch) -> None:
        """Nothing is shared between layers."""

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        q, k, v = (torch.split(x, batch.query_lens) for x in (q_TNH, k_TKH, v_TKH))
        window, scaling = self._layer_windows[layer], self._scaling
        return torch.cat([attend_chunk(*qkv, window, **scaling) for qkv in zip(q, k, v, strict=True)])

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fail: there is no cache to read.

        Raises:
            EngineError: always.
        """
        raise EngineError("there is no KV cache to read back", where="the recompute backend")
