"""Messages of rank 0 to the others: lists of integers, a command and then its numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum

from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk
from reference_engine.requests.sequence import Sequence as Request

__all__ = ["Command", "decode_chunks", "encode_chunks"]


class Command(IntEnum):
    """The commands of rank 0."""

    STOP = 0
    STEP = 1
    """Whether it is observed, then the chunks."""
    COPY_BLOCK = 2
    """Source and target."""
    READ_BACK = 3
    """One chunk: a request's computed tokens."""


def encode_chunks(chunks: Sequence[ScheduledChunk]) -> Iterator[int]:
    """Yield, per chunk: start, stop, tokens known, drafts, rotary length, blocks; then blocks and tokens to compute."""
    for chunk in chunks:
        sequence = chunk.sequence
        numbers = sequence.num_tokens, sequence.num_drafts, sequence.rope_len or 0, len(sequence.block_table)
        yield from (chunk.start, chunk.stop, *numbers)
        yield from sequence.block_table
        yield from sequence.token_ids[chunk.start : chunk.stop]


def decode_chunks(numbers: Sequence[int]) -> list[ScheduledChunk]:
    """Return chunks that compute the same; tokens that are not computed are zeros."""
    chunks: list[ScheduledChunk] = []
    at = 0
    while at < len(numbers):
        start, stop, num_tokens, num_drafts, rope_len, num_blocks = numbers[at : at + 6]
        at += 6
        table, tokens = numbers[at : at + num_blocks], numbers[at + num_blocks : at + num_blocks + stop - start]
        at += num_blocks + stop - start
        request = Request(
            request_id=len(chunks),
            token_ids=[0] * start + list(tokens) + [0] * (num_tokens - stop),
            num_prompt_tokens=num_tokens,
            params=SamplingParams(),
            rope_len=rope_len or None,
            block_table=array("q", table),
            num_drafts=num_drafts,
        )
        request.num_computed_tokens = stop
        chunks.append(ScheduledChunk(request, start, stop))
    return chunks
