"""Requests whose K and V lie in shuffled blocks of a cache that is NaN everywhere else, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["TOLERANCE", "Workload", "attention", "relative_l2"]

# Of the relative L2 error of a whole output; about three roundings (float32: of its sums).
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}


@dataclass
class Workload:
    """Shapes: C context tokens, N query heads, K KV heads, G = N / K, H head dim, S slots in a block, R requests."""

    device: torch.device
    context_lens: tuple[int, ...] = (1, 15, 16, 17, 33)
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    k: list[torch.Tensor] = field(init=False)
    """[C, K, H] of each request."""
    v: list[torch.Tensor] = field(init=False)
    tables: torch.Tensor = field(init=False)
    """[R, B], the rest of short tables 0: the null block, which is NaN here."""
    caches: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    """K and V, [B, S, K, H]."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        widths = [-(-context_len // self.block_size) for context_len in self.context_lens]
        blocks = (1 + torch.randperm(sum(widths) + 3, generator=self.generator)).split([*widths, 3])[:-1]
        self.tables = torch.zeros(len(widths), max(1, *widths), dtype=torch.int64, device=self.device)
        for row, table_blocks in zip(self.tables, blocks, strict=True):
            row[: len(table_blocks)] = table_blocks
        shape = (sum(widths) + 4, self.block_size, self.num_kv_heads, self.head_dim)
        self.caches = tuple(torch.full(shape, torch.nan, dtype=self.dtype, device=self.device) for _ in "kv")
        self.k, self.v = ([self.random(c, self.num_kv_heads) for c in self.context_lens] for _ in "kv")
        for request in range(len(widths)):
            self.write(request)

    def random(self, num_rows: int, num_heads: int) -> torch.Tensor:
        rows = torch.randn(num_rows, num_heads, self.head_dim, generator=self.generator)
        return rows.to(self.device, self.dtype)

    def slots(self, request: int) -> torch.Tensor:
        positions = torch.arange(self.context_lens[request], device=self.device)
        return self.tables[request, positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, request: int) -> None:
        for cache, rows in zip(self.caches, (self.k[request], self.v[request]), strict=True):
            cache.flatten(0, 1)[self.slots(request)] = rows

    def queries(self, query_lens: tuple[int, ...]) -> torch.Tensor:
        return self.random(sum(query_lens), self.num_kv_heads * self.group)

    def expected(self, q: torch.Tensor, query_lens: tuple[int, ...], window: int | None = None) -> torch.Tensor:
        parts = zip(q.split(query_lens), self.k, self.v, strict=True)
        return torch.cat([attention(q, k, v, window) for q, k, v in parts])

    def output(self, q: torch.Tensor) -> torch.Tensor:
        """An output that shows what has not been written."""
        return torch.full_like(q, torch.nan)

    def prefill(
        self, q: torch.Tensor, query_lens: tuple[int, ...], window: int | None = None, **tiling: Any
    ) -> torch.Tensor:
        from reference_engine.fast.kernels.paged_prefill import cut_into_tiles, paged_prefill

        chosen = self.tiling(**tiling)
        tiles = torch.tensor(cut_into_tiles(query_lens, self.context_lens, chosen.rows), dtype=torch.int32)
        out = self.output(q)
        paged_prefill(q, *self.caches, self.tables, tiles.to(self.device), out, window=window, tiling=chosen)
        return out

    def decode(self, q: torch.Tensor, window: int | None = None, min_split_keys: int = 256) -> torch.Tensor:
        from reference_engine.fast.kernels.paged_decode import paged_decode

        out = self.output(q)
        lens = torch.tensor(self.context_lens, device=self.device)
        paged_decode(
            q, *self.caches, self.tables, lens, out, window=window, tiling=self.tiling(), min_split_keys=min_split_keys
        )
        return out

    def alone(self, request: int, run: Callable[[Workload], torch.Tensor]) -> torch.Tensor:
        """Run with this request only, its table no wider than it must be."""
        mates = self.context_lens, self.tables
        width = max(1, -(-self.context_lens[request] // self.block_size))
        self.context_lens, self.tables = (mates[0][request],), mates[1][request : request + 1, :width].contiguous()
        try:
            return run(self)
        finally:
            self.context_lens, self.tables = mates

    def tiling(self, rows: int = 16, keys: int = 16) -> Any:
        """Small tiles, so that a few tokens make several."""
        from reference_engine.fast.kernels.tiling import Tiling, power_of_two

        return Tiling(rows=rows, keys=keys, padded_head_dim=power_of_two(self.head_dim), num_warps=4)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The definition, in float64, for the last rows of a context."""
    group, offset = q.shape[1] // k.shape[1], len(k) - len(q)
    q, k, v = q.double(), *(x.double().repeat_interleave(group, dim=1) for x in (k, v))
    score = torch.einsum("tnh,cnh->ntc", q, k) * q.shape[-1] ** -0.5
    rows = offset + torch.arange(len(q), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)
    is_visible = (keys <= rows) & (keys > rows - (window or len(k)))
    return torch.einsum("ntc,cnh->tnh", score.masked_fill(~is_visible, -torch.inf).softmax(dim=-1), v)


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())
