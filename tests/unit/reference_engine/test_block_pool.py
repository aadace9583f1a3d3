from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reference_engine.block_pool import NULL_BLOCK, BlockPool
from reference_engine.errors import BlockError, CapacityError, ConfigError
from reference_engine.hooks.debug_checks import check_pool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(8, 16)
    assert sorted(pool.allocate(7)) == list(range(1, 8))
    assert NULL_BLOCK == 0
    assert pool.num_free == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (8, 0), (8, -1)])
def test_an_impossible_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="too small"):
        BlockPool(num_blocks, block_size)


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(2)
    assert not pool.can_allocate(2)
    with pytest.raises(CapacityError, match="expected 2 free blocks of 16 tokens, found 1 free of 3"):
        pool.allocate(2)
    assert pool.num_free == 1
    check_pool(pool)


def test_append_grows_a_table_at_its_end_only_when_needed() -> None:
    pool = BlockPool(8, 4)
    table: list[int] = []
    lengths = []
    for num_tokens in range(10):
        before = list(table)
        pool.append(table, num_tokens)
        assert table[: len(before)] == before
        lengths.append(len(table))
    assert lengths == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_a_failed_append_leaves_the_table() -> None:
    pool = BlockPool(3, 4)
    table: list[int] = []
    pool.append(table, 4)
    before = list(table)
    with pytest.raises(CapacityError):
        pool.append(table, 13)
    assert table == before
    check_pool(pool)


@pytest.mark.parametrize(
    ("blocks", "match"),
    [([0], "block 0"), ([9], "block 9"), ([-1], "block -1"), ([2], "block 2"), ([1, 1], "twice in one call")],
)
def test_a_wrong_free_is_refused_and_changes_nothing(blocks: list[int], match: str) -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(1) == [1]
    with pytest.raises(BlockError, match=match):
        pool.free(blocks)
    assert pool.num_free == 2
    assert pool.num_owners(1) == 1


def test_a_double_free_is_refused() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(BlockError, match="cannot free block"):
        pool.free(blocks)
    check_pool(pool)


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 2
    pool.free(blocks)
    assert pool.num_free == 3


class PoolMachine(RuleBasedStateMachine):
    """Free and owned blocks partition the pool, whatever is called."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 3)
        self.tables: list[list[int]] = []

    @rule(num_tokens=st.integers(0, 24))
    def new_table(self, num_tokens: int) -> None:
        table: list[int] = []
        fits = self.pool.can_allocate(self.pool.num_needed(num_tokens))
        try:
            self.pool.append(table, num_tokens)
        except CapacityError:
            assert not fits
        else:
            assert fits
            self.tables.append(table)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            self.pool.share(table)
            self.tables.append(list(table))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.pool.free(table)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        check_pool(self.pool)
        for block in range(1, self.pool.num_blocks):
            assert self.pool.num_owners(block) == sum(block in table for table in self.tables)
        owned = {block for table in self.tables for block in table}
        assert self.pool.num_free == self.pool.num_usable - len(owned)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
