"""The interface of an attention backend; `attention.select` has those that there are, by name.

Shapes: T tokens, C context tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from reference_engine.batch import Batch
from reference_engine.kv_cache import KVCache

__all__ = ["AttentionBackend"]


class AttentionBackend(Protocol):
    """Lets each token see the earlier ones of its request."""

    has_blocks: bool
    """Whether slots and block tables mean something to an observer."""
    block_size: int
    """Tokens in a block of the pool that the engine keeps for this backend."""
    num_blocks: int
    """Blocks of that pool, the null block included."""

    @property
    def cache(self) -> KVCache | None:
        """The cache that keeps K and V between steps. Without one, every step gets all rows of its requests."""

    def plan(self, batch: Batch) -> Any:
        """Prepare what all layers of a step share; it comes back as `batch.plan`."""

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Store K and V, and return the context [T, N, H] of softmax(q k / sqrt(H)) v over each row's own past.

        Where `CacheSpec.value_dim` is given, V is the first part of K, and so wide is the context.
        """

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored K and V, each [C, K, H], of a request's first `num_tokens` positions."""
