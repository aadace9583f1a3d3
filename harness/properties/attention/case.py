"""One batch for an attention function: its shapes, where its blocks lie, and how its tensors are made from a seed.

Shapes: T rows of all requests one after the other, N query heads, K KV heads, H head dim, B blocks, S slots in a block.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The arguments of `attend`."""

    q_TNH: torch.Tensor
    k_cache_BSKH: torch.Tensor
    v_cache_BSKH: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """A batch, small enough to be printed."""

    dtype: str
    num_kv_heads: int
    group_size: int
    """Query heads of one KV head."""
    head_dim: int
    block_size: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_shared_blocks: int = 0
    """Leading blocks that later requests have in common with the first, as far as both have them full."""
    scale: float | None = None
    """None: 1 / sqrt(H)."""
    window: int | None = None
    softcap: float | None = None
    num_splits: int | None = None
    seed: int = 0
    """Of the tensors."""
    placement: int = 0
    """Seed of the order of the physical blocks; 0: as they are needed."""
    query_level: float = 1.0
    """Standard deviation of the queries."""
    score_level: float = 1.0
    """Standard deviation of the scores, which gives that of the keys."""
    value_level: float = 1.0
    garbage: float = math.nan
    """Content of the unallocated slots."""
    device: str = "cpu"

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return sum(self.query_lens)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def true_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def key_level(self) -> float:
        """Standard deviation of the keys."""
        spread = 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)
        return self.score_level / (self.query_level * spread)

    @property
    def num_blocks(self) -> int:
        """Physical blocks, one of them in no table."""
        return 1 + sum(-(-context_len // self.block_size) for context_len in self.context_lens)

    @property
    def order(self) -> list[int]:
        """The pool's index of each block, in the order in which they are needed."""
        order = list(range(self.num_blocks))
        if self.placement:
            random.Random(self.placement).shuffle(order)
        return order

    @property
    def block_tables(self) -> list[list[int]]:
        """Physical blocks of each request."""
        free, tables = iter(self.order), list[list[int]]()
        for context_len in self.context_lens:
            shared = min(self.num_shared_blocks, *map(self._num_full_past, (0, len(tables)))) if tables else 0
            num_own = -(-context_len // self.block_size) - shared
            tables.append([*(tables[0][:shared] if tables else []), *(next(free) for _ in range(num_own))])
        return tables

    def _num_full_past(self, request: int) -> int:
        """Count the blocks that were full before this step."""
        return max(0, self.context_lens[request] - self.query_lens[request]) // self.block_size

    @property
    def options(self) -> dict[str, Any]:
        """The optional parameters of `attend` that are set."""
        named = {name: getattr(self, name) for name in ("scale", "window", "softcap", "num_splits")}
        return {name: value for name, value in named.items() if value is not None}

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield request, row and position of every row."""
        row = 0
        for request, (query_len, context_len) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            for position in range(context_len - query_len, context_len):
                yield request, row, position
                row += 1

    def owned_slots(self) -> torch.Tensor:
        """Return [B, S] bool: the slots of some request's positions."""
        owned_BS = torch.zeros(self.num_blocks, self.block_size, dtype=torch.bool)
        for table, context_len in zip(self.block_tables, self.context_lens, strict=True):
            for i in range(context_len):
                owned_BS[table[i // self.block_size], i % self.block_size] = True
        return owned_BS

    def tensors(self) -> Tensors:
        """Make the tensors. K and V are drawn in the order of need: another placement moves them, and changes none."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, level: float) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * level).to(self.torch_dtype)

        cache_shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        q_TNH = draw(self.num_rows, self.num_heads, self.head_dim, level=self.query_level)
        k_BSKH, v_BSKH = draw(*cache_shape, level=self.key_level), draw(*cache_shape, level=self.value_level)
        k_cache_BSKH, v_cache_BSKH = torch.empty_like(k_BSKH), torch.empty_like(v_BSKH)
        k_cache_BSKH[self.order], v_cache_BSKH[self.order] = k_BSKH, v_BSKH
        is_free_BS = ~self.owned_slots()
        k_cache_BSKH[is_free_BS] = v_cache_BSKH[is_free_BS] = self.garbage
        return Tensors(
            q_TNH=q_TNH.to(self.device),
            k_cache_BSKH=k_cache_BSKH.to(self.device),
            v_cache_BSKH=v_cache_BSKH.to(self.device),
        )
