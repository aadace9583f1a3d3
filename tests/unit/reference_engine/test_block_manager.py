"""Scheduler, block manager, pool and prefix cache together, under any sequence of calls, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.cache_spec import CacheSpec
from reference_engine.errors import BlockError
from reference_engine.hooks.debug_checks import DebugChecks, check_pool
from reference_engine.kv_cache import KVCache
from reference_engine.prefix_cache import PrefixCache
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.scheduler import Scheduler

from .test_prefix_cache import two_bits

MAX_TOKENS = 12


def make_cache(num_blocks: int, block_size: int) -> KVCache:
    spec = CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"),
        block_size=block_size, num_blocks=num_blocks, max_num_seqs=1, max_model_len=1,
        layer_windows=(None,),
    )  # fmt: skip
    return KVCache(spec, num_blocks, block_size)


class EngineWithoutModel(RuleBasedStateMachine):
    """The content oracle of `DebugChecks` holds after every step, whatever is called between."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        num_spare=st.integers(0, 6),
        budget=st.sampled_from([1, 3, 50]),
        max_num_seqs=st.integers(1, 3),
    )
    def start(self, block_size: int, num_spare: int, budget: int, max_num_seqs: int) -> None:
        num_blocks = 1 + -(-MAX_TOKENS // block_size) + num_spare
        cache = make_cache(num_blocks, block_size)
        self.debug = DebugChecks(cache)
        self.pool = BlockPool(num_blocks, block_size, PrefixCache(block_size, two_bits), self.debug.discard)
        self.scheduler = Scheduler(
            BlockManager(self.pool, self.debug.copy), max_num_batched_tokens=budget, max_num_seqs=max_num_seqs
        )
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.requests: list[Sequence] = []
        self.num_requests = 0

    def _new_id(self) -> int:
        self.num_requests += 1
        return self.num_requests

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS - 1), salt=st.sampled_from(["", "x"]))
    def add(self, token_ids: list[int], salt: str) -> None:
        params = SamplingParams(cache_salt=salt)
        sequence = Sequence(
            request_id=self._new_id(), token_ids=token_ids, num_prompt_tokens=len(token_ids), params=params
        )
        self.scheduler.add(sequence)
        self.requests.append(sequence)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        parent = data.draw(st.sampled_from(self.requests))
        child = parent.fork(self._new_id(), parent.params, seed=0)
        self.scheduler.fork(parent, child)
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.requests))
        self.requests.remove(sequence)
        self.scheduler.abort(sequence)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step(self, data: Any) -> None:
        chunks = self.scheduler.schedule()
        assert chunks, "somebody always progresses"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        self.debug.before_step(chunks, self.pool)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.advance(chunks)
        self.debug.after_step(chunks, self.scheduler.running, self.pool)
        for sequence in sampling:
            sequence.append(data.draw(st.integers(0, 1)))
            if sequence.num_tokens > MAX_TOKENS:
                self.requests.remove(sequence)
                self.scheduler.finish(sequence)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "pool"):
            self.debug.after_step([], self.scheduler.running, self.pool)
            assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.requests)
            assert all(len(sequence.block_table) == 0 for sequence in self.scheduler.waiting)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for sequence in self.requests:
                self.scheduler.abort(sequence)
            assert self.pool.num_free == self.pool.num_usable


TestEngineWithoutModel = EngineWithoutModel.TestCase
TestEngineWithoutModel.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def make_manager(block_size: int = 4) -> tuple[BlockManager, list[tuple[int, int]]]:
    copies: list[tuple[int, int]] = []
    pool = BlockPool(20, block_size, PrefixCache(block_size))
    return BlockManager(pool, lambda source, target: copies.append((source, target))), copies


def make_sequence(num_tokens: int) -> Sequence:
    token_ids = list(range(num_tokens))
    return Sequence(request_id=0, token_ids=token_ids, num_prompt_tokens=num_tokens, params=SamplingParams())


def compute(manager: BlockManager, sequence: Sequence) -> int:
    """Compute a whole request, and return how many of its tokens were cached."""
    start = manager.take_prefix(sequence)
    assert manager.grow(sequence, sequence.num_tokens)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.publish([ScheduledChunk(sequence, start, sequence.num_tokens)])
    return start


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 9])
def test_resubmitting_hits_all_but_the_last_token_s_block(num_tokens: int, block_size: int) -> None:
    manager, _ = make_manager(block_size)
    first = make_sequence(num_tokens)
    assert compute(manager, first) == 0
    manager.release(first)
    assert compute(manager, make_sequence(num_tokens)) == (num_tokens - 1) // block_size * block_size


def test_nothing_is_found_before_it_is_computed() -> None:
    manager, _ = make_manager()
    first, second = make_sequence(9), make_sequence(9)
    assert manager.take_prefix(first) == 0
    assert manager.grow(first, 9)
    assert manager.take_prefix(second) == 0


def test_a_fork_copies_the_last_block_once_it_is_written() -> None:
    manager, copies = make_manager()
    parent, child = make_sequence(6), make_sequence(6)
    compute(manager, parent)
    manager.share(parent, child)
    assert child.block_table == parent.block_table
    assert manager.grow(parent, 7)
    assert manager.grow(child, 7)
    assert copies == [(child.block_table[1], parent.block_table[1])]
    assert child.block_table[0] == parent.block_table[0]
    check_pool(manager.pool, [parent.block_table, child.block_table])


def test_a_fork_between_blocks_copies_nothing() -> None:
    manager, copies = make_manager()
    parent, child = make_sequence(8), make_sequence(8)
    compute(manager, parent)
    manager.share(parent, child)
    assert manager.grow(parent, 9)
    assert manager.grow(child, 9)
    assert copies == []
    assert parent.block_table[:2] == child.block_table[:2]
    assert parent.block_table[2] != child.block_table[2]


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    manager, copies = make_manager()
    parent, child = make_sequence(6), make_sequence(6)
    compute(manager, parent)
    manager.share(parent, child)
    manager.pool.allocate(manager.pool.num_free)
    before = list(parent.block_table)
    assert not manager.grow(parent, 7)
    assert (list(parent.block_table), copies) == (before, [])


def test_debug_checks_see_a_shared_block_written_and_wrong_content() -> None:
    manager, _ = make_manager()
    parent, child = make_sequence(6), make_sequence(6)
    compute(manager, parent)
    debug = DebugChecks(make_cache(20, 4))
    whole = ScheduledChunk(parent, 0, 6)
    debug.after_step([whole], [parent], manager.pool)
    manager.share(parent, child)
    with pytest.raises(BlockError, match=r"request 0 would write a block that is not its own.*1 owner, found 2"):
        debug.before_step([whole], manager.pool)
    child.token_ids[5] = 99
    with pytest.raises(BlockError, match=r"does not hold its own prefix, in position 5: expected prefix 6, found 5"):
        debug.after_step([], [parent, child], manager.pool)
