"""The Triton kernels under the attention suite, each launched as it is, without the backend that shares rows out.

Shapes: T rows of all requests, R requests, N query heads, K KV heads, H head dim, B blocks, S slots in a block.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils.rnn import pad_sequence

TILE = 16
"""Rows and keys of the smallest tile: a few tokens make several."""


class KernelAttention:
    """Single rows by `paged_decode`, chunks by `paged_prefill`; imported at each call: mutants come and go."""

    device = "cpu"
    is_batch_invariant = True
    serves_masked_rows = True
    pad_slot = -1

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
        from reference_engine.fast.kernels import paged_prefill, tiling

        caches = k_cache_BSKH, v_cache_BSKH
        tables_RB = _tables(block_tables, k_cache_BSKH)
        options = {
            "window": window,
            "tiling": replace(tiling.find_tiling(q_TNH.shape[-1], q_TNH.dtype), rows=TILE, keys=TILE),
        }
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        single = [request for request, query_len in enumerate(query_lens) if query_len == 1]
        if single:
            rows = [sum(query_lens[:request]) for request in single]
            lens = torch.tensor([context_lens[request] for request in single], device=q_TNH.device)
            out_TNH[rows] = _decode(_strided(q_TNH[rows]), caches, tables_RB[single], lens, out_TNH[rows],
                                    num_splits, options)  # fmt: skip
        cut = paged_prefill.cut_into_tiles(query_lens, context_lens, TILE)
        tiles = [tile for tile in cut if query_lens[tile[0]] > 1]
        if tiles:
            tiles_M4 = torch.tensor(tiles, dtype=torch.int32, device=q_TNH.device)
            paged_prefill.paged_prefill(_strided(q_TNH), *caches, tables_RB, tiles_M4, out_TNH, **options)
        return out_TNH

    def store(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        slots_T: torch.Tensor,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
    ) -> None:
        from reference_engine.fast.kernels import store_kv

        store_kv.store_kv(_strided(k_TKH), _strided(v_TKH), slots_T, k_cache_BSKH, v_cache_BSKH)


def _decode(
    q_RNH: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables_RB: torch.Tensor,
    lens_R: torch.Tensor,
    out_RNH: torch.Tensor,
    num_splits: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return `out_RNH`: in the splits that an engine has, or in so many (to the next power of two) of short ones."""
    from reference_engine.fast.kernels import paged_decode

    most, fewest_keys = paged_decode.max_splits(caches[0].shape[2]), paged_decode.MIN_SPLIT_KEYS
    if num_splits is not None:
        most, fewest_keys = 1 << (num_splits - 1).bit_length(), TILE
    with patch.object(paged_decode, "max_splits", lambda _: most):
        paged_decode.paged_decode(q_RNH, *caches, tables_RB, lens_R, out_RNH, min_split_keys=fewest_keys, **options)
    return out_RNH


def _tables(block_tables: Sequence[Sequence[int]], cache_BSKH: torch.Tensor) -> torch.Tensor:
    """Return block tables, wider than any request needs, as an engine's are; the rest is block 0."""
    wider = [0] * (TILE // cache_BSKH.shape[1] + 1)
    rows = [torch.tensor([*table, *wider], device=cache_BSKH.device) for table in block_tables]
    return pad_sequence(rows, batch_first=True)


def _strided(rows_TNH: torch.Tensor) -> torch.Tensor:
    """Return the same rows as a view of wider ones, as of a fused projection."""
    return torch.cat([rows_TNH, torch.full_like(rows_TNH, torch.nan)], dim=1)[:, : rows_TNH.shape[1]]
