from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.block_pool import BlockPool
from reference_engine.errors import BlockError
from reference_engine.hooks.debug_checks import check_pool
from reference_engine.prefix_cache import Prefix, PrefixCache, sha256_digest


def two_bits(data: bytes) -> bytes:
    """A hash that collides all the time."""
    return bytes([hashlib.sha256(data).digest()[0] & 3])


def chain_of(cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[Prefix]:
    chain: list[Prefix] = []
    cache.extend(chain, token_ids, len(token_ids), salt)
    return chain


def make_pool(num_blocks: int = 8, block_size: int = 2) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache(block_size)
    return BlockPool(num_blocks, block_size, cache), cache


def store(pool: BlockPool, cache: PrefixCache, token_ids: list[int]) -> list[int]:
    """Compute and publish all full blocks of a request, and leave."""
    chain = chain_of(cache, token_ids)
    blocks = pool.share_prefix(chain)
    blocks += pool.allocate(len(chain) - len(blocks))
    for block, prefix in zip(blocks, chain, strict=True):
        pool.publish(block, prefix)
    pool.free(blocks)
    check_pool(pool, [])
    return blocks


def test_a_chain_covers_full_blocks_only_and_grows_in_place() -> None:
    cache = PrefixCache(4)
    chain = chain_of(cache, [1] * 11)
    assert [prefix.token_ids for prefix in chain] == [(1, 1, 1, 1)] * 2
    assert chain[1].parent is chain[0]
    assert chain[1].key != chain[0].key
    first = chain[0]
    cache.extend(chain, [1] * 13, 13, "")
    assert len(chain) == 3
    assert chain[0] is first


def test_the_key_is_the_hash_of_parent_and_tokens() -> None:
    (prefix,) = chain_of(PrefixCache(2), [7, 300], salt="tenant")
    numbers = (7).to_bytes(8, "little") + (300).to_bytes(8, "little")
    assert prefix.key == sha256_digest(sha256_digest(b"tenant") + numbers)


def test_salts_share_nothing() -> None:
    cache = PrefixCache(1, hash_function=lambda data: b"same")
    cache.publish(1, chain_of(cache, [5], "a")[0])
    assert cache.find(chain_of(cache, [5], "a")[0]) == 1
    assert cache.find(chain_of(cache, [5], "b")[0]) is None


def test_a_collision_of_a_parent_is_seen_in_its_child() -> None:
    cache = PrefixCache(1, hash_function=lambda data: data[-8:-7] and bytes([data[-8] % 2]))  # the last token's parity
    cache.publish(1, chain_of(cache, [2, 7])[1])
    assert cache.find(chain_of(cache, [2, 7])[1]) == 1
    assert cache.find(chain_of(cache, [4, 7])[1]) is None


def test_who_published_first_stays_and_eviction_removes_its_own_entry_only() -> None:
    cache = PrefixCache(1)
    (prefix,) = chain_of(cache, [5])
    cache.publish(1, prefix)
    cache.publish(2, chain_of(cache, [5])[0])
    assert 2 not in cache
    cache.forget(2)
    assert cache.find(prefix) == 1
    cache.forget(1)
    assert cache.find(prefix) is None
    assert len(cache) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=12), st.integers(1, 3))
def test_a_find_is_always_the_same_tokens(requests: list[list[int]], block_size: int) -> None:
    cache = PrefixCache(block_size, two_bits)
    content: dict[int, tuple[int, ...]] = {}
    for token_ids in requests:
        for index, prefix in enumerate(chain_of(cache, token_ids)):
            whole = tuple(token_ids[: (index + 1) * block_size])
            block = cache.find(prefix)
            assert block is None or content[block] == whole
            if block is None:
                block = len(content) + 1
                content[block] = whole
                cache.publish(block, prefix)


def test_freed_prefixes_are_found_again_and_count_as_free() -> None:
    pool, cache = make_pool()
    blocks = store(pool, cache, [1, 2, 3, 4])
    assert pool.num_free == pool.num_usable
    assert pool.share_prefix(chain_of(cache, [1, 2, 3, 4, 5, 6])) == blocks
    assert [pool.num_owners(block) for block in blocks] == [1, 1]
    assert pool.share_prefix(chain_of(cache, [1, 2, 9, 9])) == blocks[:1]
    assert pool.num_owners(blocks[0]) == 2
    check_pool(pool, [blocks, blocks[:1]])


def test_unused_blocks_go_before_cached_ones_and_tails_before_heads() -> None:
    pool, cache = make_pool(num_blocks=1 + 5)
    old, new = store(pool, cache, [1, 2, 3, 4]), store(pool, cache, [5, 6, 7, 8])
    (unused,) = pool.allocate(1)
    assert unused not in old + new
    assert pool.allocate(1) == old[1:]
    assert pool.share_prefix(chain_of(cache, [1, 2, 3, 4])) == old[:1], "the head is left"
    assert pool.allocate(2) == [new[1], new[0]], "what is owned is never evicted"
    assert not pool.can_allocate(1)
    check_pool(pool)


def test_a_prefix_that_is_used_becomes_the_last_to_go() -> None:
    pool, cache = make_pool(num_blocks=1 + 2, block_size=1)
    (first,), (second,) = store(pool, cache, [1]), store(pool, cache, [2])
    pool.free(pool.share_prefix(chain_of(cache, [1])))
    assert pool.allocate(2) == [second, first]


def test_the_cache_can_be_reset() -> None:
    pool, cache = make_pool()
    store(pool, cache, [1, 2, 3, 4])
    owned = pool.share_prefix(chain_of(cache, [1, 2]))
    pool.reset_prefix_cache()
    assert len(cache) == 0
    check_pool(pool, [owned])
    pool.free(owned)
    check_pool(pool, [])
    assert pool.num_free == pool.num_usable


def test_what_nobody_owns_cannot_be_published() -> None:
    pool, cache = make_pool()
    with pytest.raises(BlockError, match="cannot publish block 3"):
        pool.publish(3, chain_of(cache, [1, 2])[0])


def test_who_is_told_of_discarded_blocks() -> None:
    discarded: list[int] = []
    cache = PrefixCache(1)
    pool = BlockPool(3, 1, cache, on_discard=discarded.append)
    (cached,) = store(pool, cache, [1])
    assert discarded == []
    plain, *_ = pool.allocate(2)
    assert discarded == [cached]
    pool.free([plain])
    assert discarded == [cached, plain]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[1], [1]], r"owner counts.*expected \{1: 2\}, found \{1: 1, 2: 1\}"),
        ([[1, 1]], r"twice in one table.*found \[\[1, 1\]\]"),
        ([[1, 2, 3]], r"owner counts.*expected \{1: 1, 2: 1, 3: 1\}, found \{1: 1, 2: 1\}"),
    ],
)
def test_check_names_what_is_broken(tables: list[list[int]], message: str) -> None:
    pool, _ = make_pool()
    pool.allocate(2)
    check_pool(pool, [[1, 2]])
    with pytest.raises(BlockError, match=message):
        check_pool(pool, tables)
