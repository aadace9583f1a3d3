"""Faults of speculation and of going back: what is rejected, or taken back, leaves something behind."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

import reference_engine.attention.paged
import reference_engine.model_runner
import reference_engine.speculation
from harness.extensions.faults.fault import (
    BLOCK_SIZE,
    FIRST_DECODE,
    PROMPT_LENGTHS,
    Category,
    FaultConfig,
    Row,
    table_of,
)
from harness.extensions.faults.reference.injection import InjectedFault, device_of, replaced, replacing
from reference_engine.attention.paged import PagedAttention
from reference_engine.batch import slots_of
from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.engine import LLMEngine
from reference_engine.kv_cache import KVCache
from reference_engine.requests.sequence import ScheduledChunk

_K_CACHE, _ATTENTION, _Q_ROPE = "model.layers.0.k_cache", "model.layers.0.attention", "model.layers.0.q_rope"
_SPECULATIVE = FaultConfig(schedule="speculative", max_new_tokens=14)
_REWOUND = FaultConfig(schedule="rewound", max_new_tokens=8)
_CHECKED = {"enable_prefix_caching": "true", "debug_checks": "true"}
_REJECTED_AT = PROMPT_LENGTHS[0] + 1
_REJECTED: Row = (0, _REJECTED_AT)
"""The first step after the prompt accepts nothing."""
_SECOND_ROW: Row = (0, PROMPT_LENGTHS[0] + 2)
_LAST_OF_PROMPT: Row = (0, PROMPT_LENGTHS[0] - 1)
_LARGE_BLOCK = 16
"""So that all that is taken back is in the block that stays."""
_WINDOW = 32
"""Of gemma3-tiny."""


def _noting_rejected(slots: set[int]) -> Any:
    """Note the slot of the first rejected token of a verification, which the next token is written to."""

    def verify(original: Callable[..., int], chunk: ScheduledChunk, chosen: Any) -> int:
        end = chunk.stop
        num_accepted = original(chunk, chosen)
        if chunk.stop % BLOCK_SIZE and chunk.stop < end:  # its block is kept
            slots.update(slots_of(ScheduledChunk(chunk.sequence, chunk.stop, chunk.stop + 1), BLOCK_SIZE))
        return num_accepted

    return (reference_engine.speculation, "verify", verify)


def _noting_taken_back(slots: set[int]) -> Any:
    """Note the slots behind what a request has computed that are still its own."""

    def trim(original: Callable[..., None], self: BlockManager, sequence: Any) -> None:
        original(self, sequence)
        num_slots = len(sequence.block_table) * self.pool.block_size
        left = ScheduledChunk(sequence, sequence.num_computed_tokens + 1, num_slots)
        slots.update(slots_of(left, self.pool.block_size))

    return (BlockManager, "trim", trim)


def _stays(noting: Callable[[set[int]], Any], *, keys: bool, values: bool) -> Any:
    """What stands in the noted slots is not written over."""

    def plant() -> AbstractContextManager[InjectedFault]:
        noted = set[int]()

        def store(
            original: Callable[..., None],
            self: KVCache,
            layer: int,
            k: torch.Tensor,
            v: torch.Tensor,
            slots: torch.Tensor,
        ) -> None:
            stays = torch.tensor([slot in noted for slot in slots.tolist()], dtype=torch.bool)[:, None, None]
            old_k, old_v = self.gather(layer, slots)
            k = torch.where(stays, old_k, k) if keys else k
            original(self, layer, k, torch.where(stays, old_v, v) if values else v, slots)

        return replaced(noting(noted), (KVCache, "store", store))

    return plant


def _batch(change: Callable[[Any, list[ScheduledChunk], set[int]], Any]) -> Any:
    """Change the batch of a step; `change` also gets its chunks and the requests that have rejected tokens so far."""

    def plant() -> AbstractContextManager[InjectedFault]:
        rejecting = set[int]()

        def trim(original: Callable[..., None], self: BlockManager, sequence: Any) -> None:
            rejecting.add(sequence.request_id)
            original(self, sequence)

        def build(original: Callable[..., Any], chunks: Any, *args: Any) -> Any:
            batch = original(chunks, *args)
            with device_of(batch):
                return change(batch, list(chunks), rejecting)

        return replaced((BlockManager, "trim", trim), (reference_engine.model_runner, "build_batch", build))

    return plant


def _shifted(batch: Any, chunks: list[ScheduledChunk], rejecting: set[int]) -> Any:
    shifts = [int(chunk.sequence.request_id in rejecting) for chunk in chunks for _ in range(chunk.num_tokens)]
    return replace(batch, positions_T=batch.positions_T + torch.tensor(shifts))


def _not_advanced(batch: Any, chunks: list[ScheduledChunk], rejecting: set[int]) -> Any:
    """All rows of a verification are rotated for the position of its first one."""
    at = [
        chunk.start if chunk.is_decode else position for chunk in chunks for position in range(chunk.start, chunk.stop)
    ]
    return replace(batch, positions_T=torch.tensor(at))


def _logits_of_the_row_before(batch: Any, chunks: list[ScheduledChunk], rejecting: set[int]) -> Any:
    if not any(chunk.sequence.num_drafts for chunk in chunks):
        return batch
    return replace(batch, sampled_rows_=torch.tensor([max(0, row - 1) for row in batch.sampled_rows]))


def _context_not_shortened() -> AbstractContextManager[InjectedFault]:
    """After going back, the context ends where it ended before, as far as the request's blocks reach."""
    ends: dict[int, int] = {}

    def plan(original: Callable[..., Any], self: PagedAttention, batch: Any) -> Any:
        lens = []
        for length, table in zip(batch.context_lens, batch.block_tables, strict=True):
            end = min(ends.get(table[0], 0), -(-length // _LARGE_BLOCK) * _LARGE_BLOCK)
            lens.append(max(length, end) if len(batch.sampled_rows) == 1 and length > 1 else length)
            ends[table[0]] = max(ends.get(table[0], 0), length)
        return original(self, replace(batch, context_lens=lens, context_lens_R=torch.tensor(lens)))

    return replaced((PagedAttention, "plan", plan))


def _sees_later_drafts(
    original: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any = None
) -> torch.Tensor:
    """Every row of a verification sees all of its drafts."""
    if not 1 < len(q) < len(k):
        return original(q, k, v, window)
    return torch.cat([original(row[None], k, v, window) for row in q])


def _one_too_many(original: Callable[..., int], chunk: ScheduledChunk, chosen: Any) -> int:
    """The first rejected draft is taken for an accepted one."""
    end, tokens = chunk.stop, list(chunk.sequence.token_ids)
    num_accepted = original(chunk, chosen)
    if chunk.stop == end:
        return num_accepted
    chunk.sequence.token_ids.append(tokens[chunk.stop])
    chunk.stop += 1
    return num_accepted + 1


def _published_unverified(original: Callable[..., Any], self: LLMEngine, chunk: ScheduledChunk, choices: Any) -> Any:
    self.scheduler._blocks.publish([replace(chunk)])
    return original(self, chunk, choices)


def _blocks_kept(original: Callable[..., None], self: BlockManager, sequence: Any) -> None:
    """Blocks with nothing but rejected tokens are given back, and stay in the table."""
    table = sequence.block_table[:]
    original(self, sequence)
    sequence.block_table = table


def _ring() -> AbstractContextManager[InjectedFault]:
    """A sliding window is a ring: rejected tokens have taken the places of the oldest, which do not come back."""

    def verified(original: Callable[..., Any], self: LLMEngine, chunk: ScheduledChunk, choices: Any) -> Any:
        end = chunk.stop
        slots = slots_of(ScheduledChunk(chunk.sequence, 0, end), BLOCK_SIZE)
        result = original(self, chunk, choices)
        cache = self.backend.cache
        assert cache is not None
        for layer, window in enumerate(self.model_config.layer_windows):
            for position in range(chunk.stop, end):
                if window is not None and position >= window:
                    old, new = (divmod(slots[item], BLOCK_SIZE) for item in (position - window, position))
                    cache.data[:, layer, old[0], old[1]] = cache.data[:, layer, new[0], new[1]]
        return result

    return replaced((LLMEngine, "_verified", verified))


_fault = table_of(category=Category.DRAFTS, setting=_SPECULATIVE)
FAULTS = [
    _fault("rejected-key-stays", "The key and value of a rejected draft are not written over.",
           _stays(_noting_rejected, keys=True, values=True), "rejected draft, position", _K_CACHE, _REJECTED),
    _fault("rejected-value-stays", "The value of a rejected draft is not written over.",
           _stays(_noting_rejected, keys=False, values=True), "rejected draft, position", "model.layers.0.v_cache",
           _REJECTED),
    _fault("position-after-rejection", "After a rejection the positions of a request are one too large.",
           _batch(_shifted), r"position.*\+1", _Q_ROPE, _REJECTED),
    _fault("drafts-at-one-position", "All rows of a verification are rotated for the position of its first one.",
           _batch(_not_advanced), "position of the first row of its step", _Q_ROPE, _SECOND_ROW),
    _fault("logits-of-the-draft-before", "Each row of a verification is given the logits of the row before it.",
           _batch(_logits_of_the_row_before), "row|position", "lm_head", _SECOND_ROW),
    _fault("context-not-shortened", "After going back the context still ends where it ended before.",
           _context_not_shortened, "taken back, position", _ATTENTION, _LAST_OF_PROMPT,
           setting=replace(_REWOUND, options={"block_size": str(_LARGE_BLOCK)})),
    _fault("drafts-see-later-ones", "Every row of a verification sees all of its drafts.",
           replacing((reference_engine.attention.paged, "attend_chunk", _sees_later_drafts)),
           "sees all tokens of its step", _ATTENTION, FIRST_DECODE),
    _fault("one-draft-too-many", "The first rejected draft is taken for an accepted one.",
           replacing((reference_engine.speculation, "verify", _one_too_many)), "rejected draft, position", _K_CACHE,
           _REJECTED),
    _fault("rejected-hash", "A block is found by its hash before its drafts are verified.",
           replacing((LLMEngine, "_verified", _published_unverified)), "prefix cached in block", None, None,
           setting=replace(_SPECULATIVE, options={**_CHECKED, "block_size": "2"})),
    _fault("rejected-blocks-kept", "Blocks of rejected drafts are freed and stay in the request's table.",
           replacing((BlockManager, "trim", _blocks_kept)), "block", None, None,
           setting=replace(_SPECULATIVE, options={"block_size": "2"})),
    _fault("ring-not-rewound", "The ring of a sliding window keeps rejected drafts where older tokens were.", _ring,
           "rejected draft, position", _K_CACHE, (0, _REJECTED_AT - _WINDOW),
           setting=replace(_SPECULATIVE, model="gemma3-tiny")),
    _fault("taken-back-key-stays", "Keys and values that a request went back over are not written over.",
           _stays(_noting_taken_back, keys=True, values=True), "taken back, position", _K_CACHE, FIRST_DECODE,
           setting=_REWOUND),
    _fault("position-after-going-back", "After going back the positions of a request are one too large.",
           _batch(_shifted), r"position.*\+1", _Q_ROPE, _LAST_OF_PROMPT, setting=_REWOUND),
    _fault("hash-after-going-back", "A block that is written again is still found under what it held.",
           replacing((BlockPool, "unpublish", lambda original, self, block: None)), "prefix cached in block",
           None, None, setting=replace(_REWOUND, options=_CHECKED)),
]  # fmt: skip
