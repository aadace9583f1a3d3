"""One step's input, passed explicitly through every layer: there is no context hidden elsewhere.

Rows of all requests are packed one after the other, without padding. Requests with one row come first, so that a
backend can take them as one batch. Everything is built on the host and moved once; no layer waits for the device.

Shapes: T tokens, R requests, B blocks of the longest block table.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from reference_engine.block_pool import NULL_BLOCK
from reference_engine.lora.adapter import Adapter, rows_by_adapter
from reference_engine.observer import Observer
from reference_engine.requests.sequence import ScheduledChunk

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
    rope_lens: Sequence[int] = ()
    """[R] `Sequence.rope_len` of each request; nothing where the frequencies do not follow the length."""
    plan: Any = None
    """The attention backend's plan, made once for all layers."""
    adapters: Sequence[tuple[Adapter, torch.Tensor]] = ()
    """LoRA adapters of the step, each with its rows, int64."""
    pieces: Sequence[Any] = ()
    """The rows by the states that they start from (`families.state_cache.Piece`); empty where no layer has a state."""

    @property
    def num_single(self) -> int:
        """Leading requests with one row."""
        return self.query_lens.count(1)

    def adapt(self, prefix: str, product: str, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """Add what the rows' adapters add to a product's result, in place, and return it."""
        for adapter, rows_T in self.adapters:
            adapter.add(prefix + product, rows_T, x_TI, y_TO)
        return y_TO

    def tap(self, prefix: str, name: str, tensor: torch.Tensor) -> None:
        """Show an intermediate to the observer, if there is one."""
        if self.observer is not None:
            self.observer.tap(prefix + name, tensor)


def build_batch(
    chunks: Sequence[ScheduledChunk],
    block_size: int,
    device: torch.device,
    observer: Observer | None = None,
    adapters: Mapping[str, Adapter] | None = None,
) -> Batch:
    """Pack chunks, those of one token first, into the tensors of one step.

    All numbers are worked out on the host as one int64 array, which is moved once and then cut into tensors.
    """
    starts, stops = [chunk.start for chunk in chunks], [chunk.stop for chunk in chunks]
    query_lens = [stop - start for start, stop in zip(starts, stops, strict=True)]
    tables_RB = _padded([chunk.sequence.block_table for chunk in chunks])
    requests_T, positions_T = _rows(starts, query_lens)
    slots_T = tables_RB[requests_T, positions_T // block_size] * block_size + positions_T % block_size
    rows = sampled_rows(chunks)
    parts = _to_device([_token_ids(chunks), positions_T, slots_T, stops, rows, tables_RB], device)
    return Batch(
        token_ids_T=parts[0],
        positions_T=parts[1],
        slot_mapping_T=parts[2],
        block_tables_RB=parts[5].view(tables_RB.shape),
        block_tables=[chunk.sequence.block_table for chunk in chunks],
        context_lens_R=parts[3],
        query_lens=query_lens,
        context_lens=stops,
        sampled_rows=rows,
        sampled_rows_=None if len(rows) == len(positions_T) else parts[4],
        observer=observer,
        rope_lens=[chunk.sequence.rope_len for chunk in chunks if chunk.sequence.rope_len is not None],
        adapters=()
        if not adapters
        else rows_by_adapter(adapters, [chunk.sequence.params.adapter for chunk in chunks], requests_T, device),
    )


def slots_of(chunk: ScheduledChunk, block_size: int) -> list[int]:
    """Return the physical slot of each row of a chunk."""
    table = chunk.sequence.block_table
    return [table[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.stop)]


def sampled_rows(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Return the rows whose logits are needed: the last one of each chunk that has caught up, and those of drafts."""
    rows: list[int] = []
    last_row = -1
    for chunk in chunks:
        last_row += chunk.stop - chunk.start
        if chunk.stop == len(chunk.sequence.token_ids):
            if chunk.sequence.num_drafts:
                rows += range(last_row - chunk.sequence.num_drafts, last_row)
            rows.append(last_row)
    return rows


def _token_ids(chunks: Sequence[ScheduledChunk]) -> list[int]:
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.stop]
    return token_ids


def _rows(starts: Sequence[int], query_lens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the request (its place in the batch) and the position of each row."""
    lens_R, starts_R = np.array(query_lens), np.array(starts)
    requests_T = np.repeat(np.arange(len(lens_R)), lens_R)
    first_rows_R = np.cumsum(lens_R) - lens_R
    return requests_T, np.arange(len(requests_T)) + (starts_R - first_rows_R)[requests_T]


def _padded(block_tables: Sequence[array[int]]) -> np.ndarray:
    """Return [R, B]: the tables' bytes side by side, the rest zero, which is the null block."""
    assert NULL_BLOCK == 0
    width = max(map(len, block_tables))
    rows = [table.tobytes().ljust(width * table.itemsize, b"\0") for table in block_tables]
    return np.frombuffer(b"".join(rows), np.int64).reshape(len(rows), width)


def _to_device(parts: Sequence[ArrayLike], device: torch.device) -> Sequence[torch.Tensor]:
    """Move int64 arrays in one copy; each comes back flat."""
    arrays = [np.asarray(part, np.int64).ravel() for part in parts]
    host = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":  # only a copy from pinned memory is asynchronous
        host = host.pin_memory().to(device, non_blocking=True)
    tensors: Sequence[torch.Tensor] = host.split([len(part) for part in arrays])
    return tensors
