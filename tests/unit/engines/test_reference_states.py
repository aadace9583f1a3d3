"""Faults in the states of the reference engine's recurrent layers, found by a check at the right place."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import harness
from reference_engine import control
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.families import qwen3_next
from reference_engine.families.qwen3_next import GatedDeltaNet, gated_delta_rule
from reference_engine.families.state_cache import Piece, StateCache
from reference_engine.requests.sequence import ScheduledChunk

PROMPTS = [[3 + (7 * n * n + 11 * n) % 240 for n in range(38)], [3 + (5 * n * n + 3 * n) % 240 for n in range(23)]]
Planted = AbstractContextManager[Any]
plan, pieces_of, advance = StateCache.plan, StateCache._pieces, GatedDeltaNet._advance


def where_chunks_begin(is_wanted: Callable[[ScheduledChunk], bool]) -> Planted:
    """Let chunks begin with zero."""

    def planned(self: StateCache, chunks: list[ScheduledChunk]) -> list[Piece]:
        pieces, row, first_rows = plan(self, chunks), 0, set()
        for chunk in chunks:
            if is_wanted(chunk) and chunk.start:
                first_rows.add(row)
            row += chunk.num_tokens
        return [replace(item, source=NULL_BLOCK) if item.first_row in first_rows else item for item in pieces]

    return patch.object(StateCache, "plan", planned)


def not_restored() -> Planted:
    seen: set[int] = set()

    def is_first(chunk: ScheduledChunk) -> bool:
        is_new = chunk.sequence.request_id not in seen
        seen.add(chunk.sequence.request_id)
        return is_new

    return where_chunks_begin(is_first)


def drafts_stay() -> Planted:
    accept, copy = StateCache.accept, StateCache.copy

    def accepted(self: StateCache, slots: list[int]) -> None:
        accept(self, slots)
        if self._guesses:
            block, last = max(slots) // self.block_size, list(self._guesses.values())[-1]
            num_tokens = self.num_tokens[block]
            copy(self, last, block)
            self.num_tokens[block] = num_tokens

    return patch.object(StateCache, "accept", accepted)


def taken_back_stay() -> Planted:
    rewind = control.rewind_tokens

    def pieces(self: StateCache, chunk: ScheduledChunk, first_row: int) -> Iterator[Piece]:
        block = chunk.sequence.block_table[(chunk.start - 1) // self.block_size] if chunk.start else NULL_BLOCK
        if self.num_tokens[block] != chunk.start:
            last = max(range(self.num_blocks), key=self.num_tokens.__getitem__)
            self.copy(last, block)
            self.num_tokens[block] = chunk.start
        return pieces_of(self, chunk, first_row)

    stack = ExitStack()
    stack.enter_context(patch.object(StateCache, "_pieces", pieces))
    stack.enter_context(
        patch.object(control, "rewind_tokens", lambda sequence, num, size, _: rewind(sequence, num, size))
    )
    return stack


def not_copied() -> Planted:
    copy = StateCache.copy

    def copied(self: StateCache, source: int, target: int) -> None:
        copy(self, source, target)
        self.fill([target], 0.0)

    return patch.object(StateCache, "copy", copied)


def late() -> Planted:
    def advanced(self: GatedDeltaNet, pieces: list[Piece], *rows: torch.Tensor) -> torch.Tensor:
        kept = [states[self.layer] for states in (self.states.conv_LBCW, self.states.recurrent_LBNAH)]
        before = [states[[piece.source for piece in pieces]].clone() for states in kept]
        out = advance(self, pieces, *rows)
        if rows[0].shape[1] == 1:
            for states, old in zip(kept, before, strict=True):
                states[[piece.target for piece in pieces]] = old
        return out

    return patch.object(GatedDeltaNet, "_advance", advanced)


def rule(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Planted:
    names = ("q", "k", "v", "decay", "beta", "state")

    def changed(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gated_delta_rule(*(changes.get(name, torch.clone)(x) for name, x in zip(names, inputs, strict=True)))

    return patch.object(qwen3_next, "gated_delta_rule", changed)


FAULTS: dict[str, tuple[str, Callable[[], Planted], str]] = {
    "a hit's state is not restored": ("prefix-hit", not_restored, "begins with zero at position 32"),
    "lost between chunks": ("chunked", lambda: where_chunks_begin(lambda chunk: chunk.num_tokens > 1), "not carried"),
    "lost before decode": ("plain", lambda: where_chunks_begin(lambda chunk: chunk.num_tokens == 1), "not carried"),
    "rejected drafts stay": ("speculative", drafts_stay, "rejected drafts are in it"),
    "what was taken back stays": ("rewound", taken_back_stay, "taken back are in it"),
    "not copied with its block": ("forked", not_copied, "not carried"),
    "a step late": ("plain", late, "not updated in decode"),
    "decay x 1.01": ("plain", lambda: rule(decay=lambda x: x * 1.01), "decay of the state is scaled by 1.01"),
    "decay of the other sign": ("plain", lambda: rule(decay=torch.neg), ""),
    "beta is one": ("plain", lambda: rule(beta=torch.ones_like), ""),
    "keys and queries exchanged": ("plain", lambda: rule(q=lambda x: x.flip(-1)), ""),
}
"""By name: the schedule, the fault, and a part of the cause; none where no cause is known and none may be said."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_states_is_found(name: str, checkpoints: Path) -> None:
    schedule, planted, cause = FAULTS[name]
    options = {"model": checkpoints / "qwen3-next-tiny", "prompts": PROMPTS, "max_new_tokens": 10}
    with planted():
        divergence = harness.check("reference", **options, schedules=[schedule], dtype="float32").first_divergence
    assert divergence is not None
    assert divergence.tap in {
        f"model.layers.0.{tap}" for tap in ("linear_attn.norm.input", "conv_state", "recurrent_state")
    }
    assert cause in divergence.explanation.cause


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_schedule_passes(dtype: str, checkpoints: Path) -> None:
    options = {"model": checkpoints / "qwen3-next-tiny", "prompts": PROMPTS, "max_new_tokens": 10, "dtype": dtype}
    schedules = ["plain", "chunked", "batched", "mixed", "prefix-hit", "preempted", "forked", "rewound", "speculative"]
    harness.check("reference", **options, schedules=schedules, engine_options={"debug_checks": True}).assert_ok()
