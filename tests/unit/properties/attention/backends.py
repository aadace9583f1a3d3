"""The other backends of the reference engine under the attention suite: buffers, recomputation, Triton.

Shapes: T rows, R requests, C context tokens, N query heads, K KV heads, H head dim, B blocks, S slots in a block.
"""

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from harness.properties.reference.attention import Backend, PagedSubject
from reference_engine.attention.backend import AttentionBackend
from reference_engine.attention.select import find_backend
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.cache_spec import CacheSpec
from reference_engine.fast.fast_kernels import FastKernels


class ContiguousSubject(Backend):
    """The backend `contiguous`: a buffer for each request."""

    backend = "contiguous"

    def fill(
        self,
        backend: AttentionBackend,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
        block_tables: Sequence[Sequence[int]],
        contexts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> list[list[int]]:
        """Put each request's K and V into its own buffer."""
        assert backend.cache is not None
        backend.cache.data[:, 0, NULL_BLOCK + 1 :] = math.nan
        for request, context in enumerate(contexts):
            backend.cache.data[:, 0, NULL_BLOCK + 1 + request, : len(context[0])] = torch.stack(context)
        return [[NULL_BLOCK + 1 + request] for request in range(len(contexts))]


class RecomputeSubject(Backend):
    """The backend `recompute`: no cache, all rows of a request in every step."""

    backend = "recompute"

    def rows(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> Sequence[int]:
        """Return the context lengths: the rows in front of those asked for are padding here."""
        return context_lens

    def fill(
        self,
        backend: AttentionBackend,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
        block_tables: Sequence[Sequence[int]],
        contexts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> list[list[int]]:
        """There is nothing to fill."""
        return [[NULL_BLOCK + 1 + request] for request in range(len(contexts))]


class TritonSubject(PagedSubject):
    """The backend `triton`, by its interpreter if there is no GPU (TRITON_INTERPRET=1)."""

    backend = "triton"
    is_batch_invariant = True

    def store(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        slots_T: torch.Tensor,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
    ) -> None:
        """Write by the engine's kernel."""
        from reference_engine.fast.kernels.store_kv import store_kv  # where triton is installed

        store_kv(k_TKH, v_TKH, slots_T, k_cache_BSKH, v_cache_BSKH)

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
        *,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        window: int | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        """Attend, in decode with the shortest splits that there are where some are asked for."""
        self._is_split = num_splits is not None
        return super().attend(
            q_TNH, k_cache_BSKH, v_cache_BSKH, block_tables=block_tables, query_lens=query_lens,
            context_lens=context_lens, window=window,
        )  # fmt: skip

    def open(self, spec: CacheSpec) -> AttentionBackend:
        """Open the backend."""
        backend: Any = find_backend(self.backend, spec, FastKernels.backends)(spec)
        if self._is_split:
            decode = partial(backend.operators.paged_decode, min_split_keys=backend._tiling.keys)
            backend.operators = SimpleNamespace(**{**vars(backend.operators), "paged_decode": decode})
        opened: AttentionBackend = backend
        return opened
