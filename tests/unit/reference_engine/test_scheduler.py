from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.hooks.debug_checks import check_pool
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.scheduler import Scheduler


def make_scheduler(*, num_blocks: int = 100, block_size: int = 4, budget: int = 8, max_num_seqs: int = 4) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    scheduler = Scheduler(
        BlockManager(pool),
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        before_release=lambda sequence: None,
    )
    scheduler.pool = pool  # for the tests' eyes
    return scheduler


def add(scheduler: Scheduler, request_id: int, num_tokens: int, max_new_tokens: int = 100) -> Sequence:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    sequence = Sequence(request_id=request_id, token_ids=[1] * num_tokens, num_prompt_tokens=num_tokens, params=params)
    scheduler.add(sequence)
    return sequence


def compute(chunks: list[ScheduledChunk]) -> None:
    """Do what the engine does, without a model."""
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    for chunk in chunks:
        chunk.sequence.num_computed_tokens = chunk.stop
    for sequence in sampling:
        sequence.append(1)


def spans(chunks: list[ScheduledChunk]) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.stop) for chunk in chunks]


def test_a_prompt_is_cut_to_the_budget_and_decodes_go_first() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, 0, 5)
    add(scheduler, 1, 10)
    chunks = scheduler.schedule()
    assert spans(chunks) == [(0, 0, 5), (1, 0, 3)]
    compute(chunks)
    chunks = scheduler.schedule()
    assert spans(chunks) == [(0, 5, 6), (1, 3, 10)]
    assert [chunk.is_decode for chunk in chunks] == [True, False]
    assert [chunk.samples for chunk in chunks] == [True, True]


def test_no_more_requests_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in range(3):
        add(scheduler, request_id, 1)
    assert spans(scheduler.schedule()) == [(0, 0, 1), (1, 0, 1)]


def test_a_request_waits_for_blocks_and_nobody_overtakes_it() -> None:
    scheduler = make_scheduler(num_blocks=1 + 3, budget=100)
    add(scheduler, 0, 8)
    add(scheduler, 1, 8)
    add(scheduler, 2, 1)
    assert spans(scheduler.schedule()) == [(0, 0, 8)]


def test_the_youngest_gives_way_and_resumes_before_later_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, budget=100)
    old, young = add(scheduler, 0, 8), add(scheduler, 1, 8)
    compute(scheduler.schedule())
    late = add(scheduler, 2, 1)
    assert spans(scheduler.schedule()) == [(0, 8, 9)]
    assert list(scheduler.waiting) == [young, late]
    assert young.num_computed_tokens == 0
    assert len(young.block_table) == 0
    assert len(young.token_ids) == 9, "what was generated is kept"
    assert len(old.block_table) == 3


def test_a_request_preempts_itself_when_it_is_the_youngest() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, budget=100)
    add(scheduler, 0, 6)
    youngest = add(scheduler, 1, 8)
    compute(scheduler.schedule())
    assert spans(scheduler.schedule()) == [(0, 6, 7)]
    assert list(scheduler.waiting) == [youngest]


def test_finish_and_abort_give_all_blocks_back() -> None:
    scheduler = make_scheduler()
    first, second, third = (add(scheduler, i, 4) for i in range(3))
    scheduler.schedule()
    scheduler.finish(first)
    scheduler.abort(second)
    scheduler.abort(third)
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_free == scheduler.pool.num_usable


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=7),
    block_size=st.sampled_from([1, 3, 16]),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 5),
    num_spare_blocks=st.integers(0, 10),
)
def test_every_request_ends_within_the_limits(
    requests: list[tuple[int, int]], block_size: int, budget: int, max_num_seqs: int, num_spare_blocks: int
) -> None:
    num_needed = max(-(-(prompt + new - 1) // block_size) for prompt, new in requests)
    scheduler = make_scheduler(
        num_blocks=1 + num_needed + num_spare_blocks, block_size=block_size, budget=budget, max_num_seqs=max_num_seqs
    )
    sequences = [add(scheduler, i, prompt, new) for i, (prompt, new) in enumerate(requests)]
    for _ in range(5000):
        if not scheduler.has_unfinished:
            break
        chunks = scheduler.schedule()
        _check_limits(scheduler, chunks, budget, max_num_seqs)
        compute(chunks)
        for sequence in [c.sequence for c in chunks]:
            if len(sequence.sampled_token_ids) == sequence.params.max_new_tokens:
                scheduler.finish(sequence)
    assert not scheduler.has_unfinished
    assert [len(s.sampled_token_ids) for s in sequences] == [new for _, new in requests]
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def _check_limits(scheduler: Scheduler, chunks: list[ScheduledChunk], budget: int, max_num_seqs: int) -> None:
    assert chunks, "somebody always progresses"
    assert sum(chunk.num_tokens for chunk in chunks) <= budget
    assert len(scheduler.running) <= max_num_seqs
    assert [chunk.num_tokens > 1 for chunk in chunks] == sorted(chunk.num_tokens > 1 for chunk in chunks)
    assert {chunk.sequence for chunk in chunks} == set(scheduler.running), "whoever runs progresses"
    behind = [chunk.sequence for chunk in chunks if not chunk.samples]
    assert behind in ([], scheduler.running[-1:]), "only the youngest may be amid its prompt"
    for chunk in chunks:
        assert 0 < chunk.num_tokens <= chunk.sequence.num_remaining_tokens
        assert len(chunk.sequence.block_table) == scheduler.pool.num_needed(chunk.stop)
    ids = [sequence.request_id for sequence in [*scheduler.running, *scheduler.waiting]]
    assert ids == sorted(ids), "first come, first served, preempted ones included"
    check_pool(scheduler.pool)
    blocks = [block for sequence in scheduler.running for block in sequence.block_table]
    assert len(blocks) == len(set(blocks))
