from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.batch import build_batch, slots_of
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence

CPU = torch.device("cpu")


def make_chunk(table: list[int], num_tokens: int, start: int, stop: int) -> ScheduledChunk:
    tokens = [100 * table[0] + position for position in range(num_tokens)]
    sequence = Sequence(request_id=0, token_ids=tokens, num_prompt_tokens=num_tokens, params=SamplingParams())
    sequence.block_table = array("q", table)
    return ScheduledChunk(sequence, start, stop)


def test_rows_are_packed_with_their_slots_and_padded_tables() -> None:
    batch = build_batch([make_chunk([5], 3, 2, 3), make_chunk([2, 9, 4], 9, 3, 8)], 3, CPU)
    assert batch.token_ids_T.tolist() == [502, 203, 204, 205, 206, 207]
    assert batch.positions_T.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.slot_mapping_T.tolist() == [17, 27, 28, 29, 12, 13]
    assert batch.block_tables_RB.tolist() == [[5, NULL_BLOCK, NULL_BLOCK], [2, 9, 4]]
    assert batch.context_lens_R.tolist() == batch.context_lens == [3, 8]
    assert (batch.query_lens, batch.num_single) == ([1, 5], 1)
    assert batch.sampled_rows == [0]
    assert batch.sampled_rows_ is not None
    assert batch.sampled_rows_.tolist() == [0]


def test_no_rows_are_picked_where_all_are_sampled() -> None:
    assert build_batch([make_chunk([1], 1, 0, 1)], 4, CPU).sampled_rows_ is None


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(0, 3)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 5, 16]),
)
def test_every_row_goes_to_its_own_slot(lens: list[tuple[int, int, int]], block_size: int) -> None:
    free = iter(range(1, 1000))
    chunks = []
    for num_tokens, start, num_behind in lens:
        table = [next(free) for _ in range(-(-num_tokens // block_size))]
        start = min(start, num_tokens - 1)
        chunks.append(make_chunk(table, num_tokens, start, max(start + 1, num_tokens - num_behind)))
    batch = build_batch(chunks, block_size, CPU)
    assert batch.slot_mapping_T.tolist() == [slot for chunk in chunks for slot in slots_of(chunk, block_size)]
    assert batch.positions_T.tolist() == [p for chunk in chunks for p in range(chunk.start, chunk.stop)]
    assert len(set(batch.slot_mapping_T.tolist())) == sum(batch.query_lens)
    assert len(batch.sampled_rows) == sum(chunk.samples for chunk in chunks)


@pytest.mark.parametrize("name", ["token_ids_T", "positions_T", "slot_mapping_T", "block_tables_RB", "context_lens_R"])
def test_everything_is_int64(name: str) -> None:
    assert getattr(build_batch([make_chunk([1], 3, 0, 2)], 4, CPU), name).dtype is torch.int64
