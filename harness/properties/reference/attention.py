"""The reference engine's attention backends under the attention suite.

Shapes: T rows, R requests, C context tokens, N query heads, K KV heads, H head dim, B blocks, S slots in a block.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.properties.attention.definition import context_of
from reference_engine.attention.backend import AttentionBackend
from reference_engine.attention.select import find_backend
from reference_engine.batch import build_batch
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.cache_spec import CacheSpec
from reference_engine.kv_cache import KVCache, context_slots
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk
from reference_engine.requests.sequence import Sequence as EngineSequence


class Backend:
    """Any backend over blocks: they lie as they are given, after its null block."""

    backend: str

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
    ) -> torch.Tensor:
        """Let the backend store the rows' own K and V once more, and attend."""
        contexts = [
            context_of(k_cache_BSKH, v_cache_BSKH, table, context_len)
            for table, context_len in zip(block_tables, context_lens, strict=True)
        ]
        spec = replace(_spec(k_cache_BSKH), layer_windows=(window,), max_model_len=max(context_lens))
        backend = self.open(spec)
        tables = self.fill(backend, k_cache_BSKH, v_cache_BSKH, block_tables, contexts)
        lens = self.rows(query_lens, context_lens)
        chunks = _chunks(tables, lens, context_lens)
        order = [chunk.sequence.request_id for chunk in chunks]
        q_chunks = [_padded(q, length) for q, length in zip(q_TNH.split(list(query_lens)), lens, strict=True)]
        k_chunks, v_chunks = zip(*[(k[-n:], v[-n:]) for (k, v), n in zip(contexts, lens, strict=True)], strict=True)
        q_T, k_T, v_T = (torch.cat([x[request] for request in order]) for x in (q_chunks, k_chunks, v_chunks))
        batch = build_batch(chunks, backend.block_size, q_TNH.device)
        out = backend.attend(0, q_T, k_T, v_T, replace(batch, plan=backend.plan(batch)))
        rows = dict(zip(order, out.split([lens[request] for request in order]), strict=True))
        return torch.cat([rows[request][-query_len:] for request, query_len in enumerate(query_lens)])

    def open(self, spec: CacheSpec) -> AttentionBackend:
        """Open the backend."""
        return find_backend(self.backend, spec)(spec)

    def rows(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> Sequence[int]:
        """Return how many rows of each request the backend is given."""
        return query_lens

    def fill(
        self,
        backend: AttentionBackend,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
        block_tables: Sequence[Sequence[int]],
        contexts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> list[list[int]]:
        """Put K and V into the backend's cache, and return the block tables there."""
        assert backend.cache is not None
        backend.cache.data[:, 0, NULL_BLOCK + 1 :] = torch.stack([k_cache_BSKH, v_cache_BSKH])
        return [[NULL_BLOCK + 1 + block for block in table] for table in block_tables]


class PagedSubject(Backend):
    """The backend `paged`."""

    backend = "paged"

    def store(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        slots_T: torch.Tensor,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
    ) -> None:
        """Write through a cache of the engine."""
        cache = _cache(k_cache_BSKH, v_cache_BSKH)
        cache.store(0, k_TKH, v_TKH, slots_T + k_cache_BSKH.shape[1])
        k_cache_BSKH.copy_(cache.data[0, 0, NULL_BLOCK + 1 :])
        v_cache_BSKH.copy_(cache.data[1, 0, NULL_BLOCK + 1 :])

    def read_back(
        self, k_cache_BSKH: torch.Tensor, v_cache_BSKH: torch.Tensor, block_table: Sequence[int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read through a cache of the engine."""
        table_1B = torch.tensor([list(block_table)], device=k_cache_BSKH.device) + NULL_BLOCK + 1
        slots_C = context_slots(table_1B, k_cache_BSKH.shape[1], num_tokens)[0]
        return _cache(k_cache_BSKH, v_cache_BSKH).gather(0, slots_C)


def _spec(k_cache_BSKH: torch.Tensor) -> CacheSpec:
    num_blocks, block_size, num_kv_heads, head_dim = k_cache_BSKH.shape
    return CacheSpec(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=k_cache_BSKH.dtype,
        device=k_cache_BSKH.device,
        block_size=block_size,
        num_blocks=NULL_BLOCK + 1 + num_blocks,
        max_num_seqs=num_blocks,
        max_model_len=num_blocks * block_size,
        layer_windows=(None,),
    )


def _cache(k_cache_BSKH: torch.Tensor, v_cache_BSKH: torch.Tensor) -> KVCache:
    spec = _spec(k_cache_BSKH)
    cache = KVCache(spec, NULL_BLOCK + 1 + len(k_cache_BSKH), spec.block_size)
    cache.data[:, 0, NULL_BLOCK + 1 :] = torch.stack([k_cache_BSKH, v_cache_BSKH])
    return cache


def _chunks(
    block_tables: Sequence[Sequence[int]], query_lens: Sequence[int], context_lens: Sequence[int]
) -> list[ScheduledChunk]:
    """Return a chunk for each request, single rows first, as a batch wants them."""
    chunks = []
    for request_id, (table, query_len, num_tokens) in enumerate(
        zip(block_tables, query_lens, context_lens, strict=True)
    ):
        sequence = EngineSequence(
            request_id=request_id,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            params=SamplingParams(),
            block_table=array("q", table),
        )
        chunks.append(ScheduledChunk(sequence, num_tokens - query_len, num_tokens))
    return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)


def _padded(q_TNH: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return so many rows, of which the last are those of `q_TNH`."""
    return torch.cat([q_TNH.new_zeros(num_rows - len(q_TNH), *q_TNH.shape[1:]), q_TNH])
