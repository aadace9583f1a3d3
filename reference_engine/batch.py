"""One step's input, passed explicitly through every layer: there is no context hidden elsewhere.

Rows of all requests are packed one after the other, without padding. Requests with one row come first, so that a
backend can take them as one batch. Everything is built on the host and moved once; no layer waits for the device.

Shapes: T tokens, R requests, B blocks of the longest block table.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from reference_engine.block_pool import NULL_BLOCK
from reference_engine.observer import Observer
from reference_engine.sequence import Chunk

__all__ = ["Batch", "build_batch", "sampled_rows", "slots_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one step and where their K and V live."""

    token_ids_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64."""
    slot_mapping_T: torch.Tensor
    """int64: the physical slot that each row's K and V go to."""
    block_tables_RB: torch.Tensor
    """int64: physical blocks, short tables filled with the null block."""
    block_tables: list[Sequence[int]]
    """[R] the block tables as they are, on the host."""
    context_lens_R: torch.Tensor
    """int64: tokens of each request once this step's rows are stored."""
    query_lens: list[int]
    """[R] rows of each request, on the host."""
    context_lens: list[int]
    """[R] `context_lens_R` on the host."""
    sampled_rows: list[int]
    """Rows whose logits are needed."""
    sampled_rows_: torch.Tensor | None
    """int64 `sampled_rows` on the device; None when they are all rows."""
    observer: Observer | None
    """Whoever watches the intermediates."""
    plan: Any = None
    """What the attention backend prepared once for all layers."""

    @property
    def num_single(self) -> int:
        """Leading requests with one row."""
        return self.query_lens.count(1)

    def tap(self, prefix: str, name: str, tensor: torch.Tensor) -> None:
        """Show an intermediate to the observer, if there is one."""
        if self.observer is not None:
            self.observer.tap(prefix + name, tensor)


def build_batch(
    chunks: Sequence[Chunk], block_size: int, device: torch.device, observer: Observer | None = None
) -> Batch:
    """Pack chunks, those of one token first, into the tensors of one step."""
    stops = [chunk.stop for chunk in chunks]
    query_lens = [chunk.num_tokens for chunk in chunks]
    rows = sampled_rows(chunks)
    width = max(len(chunk.sequence.block_table) for chunk in chunks)
    padded = (_padded(chunk.sequence.block_table, width) for chunk in chunks)
    return Batch(
        token_ids_T=_to_device(chain.from_iterable(c.sequence.token_ids[c.start : c.stop] for c in chunks), device),
        positions_T=_to_device(chain.from_iterable(range(c.start, c.stop) for c in chunks), device),
        slot_mapping_T=_to_device(chain.from_iterable(slots_of(c, block_size) for c in chunks), device),
        block_tables_RB=_to_device(chain.from_iterable(padded), device).view(len(chunks), width),
        block_tables=[chunk.sequence.block_table for chunk in chunks],
        context_lens_R=_to_device(stops, device),
        query_lens=query_lens,
        context_lens=stops,
        sampled_rows=rows,
        sampled_rows_=None if len(rows) == sum(query_lens) else _to_device(rows, device),
        observer=observer,
    )


def slots_of(chunk: Chunk, block_size: int) -> list[int]:
    """Return the physical slot of each row of a chunk."""
    table = chunk.sequence.block_table
    return [table[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.stop)]


def sampled_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Return the rows whose logits are needed: the last one of each chunk that has caught up."""
    rows: list[int] = []
    num_rows = 0
    for chunk in chunks:
        num_rows += chunk.num_tokens
        if chunk.samples:
            rows.append(num_rows - 1)
    return rows


def _padded(block_table: Sequence[int], width: int) -> list[int]:
    return [*block_table, *[NULL_BLOCK] * (width - len(block_table))]


def _to_device(values: Iterable[int], device: torch.device) -> torch.Tensor:
    # Only a copy from pinned memory is asynchronous.
    host = torch.tensor(list(values), dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
