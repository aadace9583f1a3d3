"""Faults of the cache: the places where keys and values are stored, and from which they are read."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from harness.extensions.faults.fault import (
    BLOCK_SIZE,
    FIRST,
    FIRST_DECODE,
    PROMPT_LENGTHS,
    SECOND,
    Category,
    FaultConfig,
    Row,
    block_manager_suite,
    table_of,
)
from harness.extensions.faults.reference.injection import InjectedFault, replaced, replacing
from reference_engine.attention.paged import PagedAttention
from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.engine import LLMEngine
from reference_engine.kv_cache import KVCache
from reference_engine.model import Attention
from reference_engine.prefix_cache import Prefix, PrefixCache

_K_CACHE, _ATTENTION = "model.layers.0.k_cache", "model.layers.0.attention"


def stored(change: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Any:
    """Change what is stored where: `change` gets the cache, k, v and slots, and returns k, v and slots."""

    def make(store: Callable[..., None], self: KVCache, layer: int, *tensors: torch.Tensor) -> None:
        k, v, slots = change(self, *tensors)
        rows = _last_of_each(slots)
        store(self, layer, k[rows], v[rows], slots[rows])

    return replacing((KVCache, "store", make))


def _last_of_each(slots: torch.Tensor) -> torch.Tensor:
    """Return the rows that stay where two go to one slot: the later one, which a GPU leaves open."""
    rows = {slot: row for row, slot in enumerate(slots.tolist())}
    return torch.tensor(sorted(rows.values()), device=slots.device)


def _slot_back_at_boundary(cache: KVCache, k: Any, v: Any, slots: torch.Tensor) -> Any:
    goes_on = torch.cat((torch.tensor([False]), slots.diff() == 1))  # a row of the same prompt stands before it
    return k, v, torch.where(goes_on & (slots % cache.block_size == 0), slots - 1, slots)


def _swapped(cache: KVCache, k: Any, v: Any, slots: Any) -> Any:
    return v, k, slots


def _in_bfloat16(cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: Any) -> Any:
    return k.to(torch.bfloat16).to(k.dtype), v.to(torch.bfloat16).to(v.dtype), slots


def _with_padding_row(cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    """A row of padding is stored at slot -1, which is the last slot of the cache."""
    last = cache.data.shape[2] * cache.block_size - 1
    return (
        torch.cat((k, torch.zeros_like(k[:1]))),
        torch.cat((v, torch.zeros_like(v[:1]))),
        torch.cat((slots, torch.tensor([last]))),
    )


def _keys_before_rotary() -> AbstractContextManager[InjectedFault]:
    """The projection's output is stored, before rotary."""
    unrotated: list[torch.Tensor] = []

    def project(original: Callable[..., Any], self: Attention, *args: Any) -> Any:
        q, k, *others = original(self, *args)
        unrotated[:] = [k]
        return q, k, *others

    def store(original: Callable[..., None], self: Any, layer: Any, k: Any, v: Any, slots: Any) -> None:
        return original(self, layer, unrotated[0], v, slots)

    return replaced((Attention, "_project", project), (KVCache, "store", store))


def _planned(change: Callable[[Any], Any]) -> Any:
    """Change the batch that attention plans its reads by; what is written goes by the slot mapping."""

    def make(plan: Callable[..., Any], self: Any, batch: Any) -> Any:
        return plan(self, change(batch))

    return replacing((PagedAttention, "plan", make))


def _is_decode(batch: Any) -> bool:
    return all(length == 1 for length in batch.query_lens)


def _wrong_block(batch: Any) -> Any:
    """In decode, the second block of the first request is read where its first one is."""
    if not _is_decode(batch) or batch.context_lens[0] <= BLOCK_SIZE:
        return batch
    tables = batch.block_tables_RB.clone()
    tables[0, 1] = tables[0, 0]
    return replace(batch, block_tables_RB=tables)


def _next_table(batch: Any) -> Any:
    return replace(batch, block_tables_RB=batch.block_tables_RB.roll(-1, dims=0)) if _is_decode(batch) else batch


def _past_the_end(batch: Any) -> Any:
    """Decode reads one slot too many; where a block has just been filled, there is none."""
    if not _is_decode(batch):
        return batch
    room = [len(table) * BLOCK_SIZE for table in batch.block_tables]
    lens = [min(length + 1, most) for length, most in zip(batch.context_lens, room, strict=True)]
    return replace(batch, context_lens=lens, context_lens_R=torch.tensor(lens))


def _without_the_last(batch: Any) -> Any:
    """Decode does not read the token that it has just stored."""
    if not _is_decode(batch):
        return batch
    lens = [length - 1 for length in batch.context_lens]
    return replace(batch, context_lens=lens, context_lens_R=torch.tensor(lens))


def _read_back_swapped(
    read_back: Callable[..., Any], self: Any, layer: int, table: Sequence[int], num_tokens: int
) -> Any:
    table = list(table)
    return read_back(self, layer, [table[1], table[0], *table[2:]] if len(table) > 1 else table, num_tokens)


def _takes_a_live_block() -> AbstractContextManager[InjectedFault]:
    """The first time one block is asked for, it is the first request's first one, which was freed too early."""
    asked = set[int]()

    def allocate(original: Callable[..., list[int]], self: BlockPool, num_blocks: int) -> list[int]:
        if num_blocks == 1 and not asked:
            asked.add(num_blocks)
            return [1]
        return original(self, num_blocks)

    return replaced(_UNCHECKED, (BlockPool, "allocate", allocate))


def _free_twice(free: Callable[..., None], self: BlockPool, blocks: Sequence[int]) -> None:
    """The blocks of a finished request stand twice in the list of free blocks."""
    free(self, blocks)
    self._unused.extend(blocks)


def _keyed_by_own_tokens(cache: PrefixCache) -> None:
    cache._hash = lambda data: data[-8 * cache.block_size :]


def _keyed_by_depth(cache: PrefixCache) -> None:
    """The hash of the n-th block of any prompt is n bytes long, and the same."""
    cache._hash = lambda data: data[: -8 * cache.block_size] + b"."


def prefixes_changed(change: Callable[[PrefixCache], None], is_same: Callable[[Prefix, Prefix], bool]) -> Any:
    """Change what a prefix cache hashes and what it compares."""

    def make(init: Callable[..., None], self: PrefixCache, *args: Any) -> None:
        init(self, *args)
        change(self)

    return replacing(
        (PrefixCache, "__init__", make), (Prefix, "is_same", lambda original, self, rival: is_same(self, rival))
    )


def _up(number: int, size: int) -> int:
    return -(-number // size) * size


def _published_when_begun(publish: Callable[..., None], self: Any, chunks: Any) -> None:
    return publish(self, [replace(chunk, stop=_up(chunk.stop, self.pool.block_size)) for chunk in chunks])


def _remembers_the_evicted(forget: Callable[..., None], self: PrefixCache, block: int) -> None:
    """The block's own entry goes, but its hash still leads to it."""
    prefix = self.prefixes.get(block)
    forget(self, block)
    if prefix is not None:
        self._blocks[prefix.key] = block


def _hit_by_hash_alone(share: Callable[..., list[int]], self: BlockPool, chain: Any) -> list[int]:
    assert self.prefix_cache is not None
    known = self.prefix_cache._blocks
    blocks = [known[prefix.key] for prefix in takewhile(lambda prefix: prefix.key in known, chain)]
    for block in blocks:
        if block in self._idle:
            del self._idle[block]
        elif block in self._unused:
            self._unused.remove(block)
        self._num_owners[block] += 1
    return blocks


def _hit_without_owner(share: Callable[..., list[int]], self: BlockPool, chain: Any) -> list[int]:
    blocks = share(self, chain)
    for block in blocks:
        self._num_owners[block] -= 1
        if self._num_owners[block] == 0:
            self._idle[block] = None
    return blocks


def _hit_of_everything(take: Callable[..., int], self: BlockManager, sequence: Any) -> int:
    """A prompt that ends with a full block is taken from the cache whole."""
    cache = self._cache
    assert cache is not None
    cache.extend(sequence.prefixes, sequence.token_ids, sequence.num_tokens, sequence.prefix_salt)
    sequence.block_table.extend(self.pool.share_prefix(sequence.prefixes))
    sequence.num_computed_tokens = len(sequence.block_table) * cache.block_size
    return int(sequence.num_computed_tokens)


def _resumes_as_if_computed(release: Callable[..., None], self: BlockManager, sequence: Any) -> None:
    """A preempted request gets other blocks, and takes what they hold for its own."""
    computed = sequence.num_computed_tokens
    release(self, sequence)
    if sequence.finish_reason is None:
        sequence.num_computed_tokens = computed


def _resumes_with_its_table(release: Callable[..., None], self: BlockManager, sequence: Any) -> None:
    """A preempted request is computed anew, into the blocks that it had, which are others' by then."""
    table = sequence.block_table[:]
    release(self, sequence)
    if sequence.finish_reason is None:
        sequence.block_table = table


_fault = table_of(category=Category.CACHE)
_UNCHECKED = (BlockPool, "_check_owned", lambda original, self, blocks, verb: None)
"""A pool that believes what it is told, as most do: ours raises on the spot."""
_ONE_OWNER = (BlockPool, "num_owners", lambda original, self, block: 1)
_ALIKE = (tuple(range(10, 18)), tuple(range(30, 38)))
"""Two blocks' worth of tokens."""
_TWINS = ((*_ALIKE[0], *range(50, 58), 7), (*_ALIKE[1], *range(50, 58), 8))
"""Different first blocks, the same second one."""
_HITS = FaultConfig(schedule="prefix-hit")
_EVICTING = FaultConfig(
    schedule="prefix-hit", prompts=(tuple(range(40, 60)), tuple(range(70, 95))), options={"num_blocks": "5"}
)
_TWO_AT_A_TIME = FaultConfig(
    prompts=tuple(tuple(range(first, first + 9)) for first in (20, 60, 100, 140)),
    options={"num_blocks": "5", "max_num_seqs": "2"},
)
_LAST_SLOT = 41
_FIRST_GROWN: Row = (0, _up(PROMPT_LENGTHS[0], BLOCK_SIZE))
"""The first request outgrows its blocks, into one that a preempted request has left and will write again."""
FAULTS = [
    _fault("slot-at-boundary", "The first token of a block is stored in the last slot of the block before.",
           stored(_slot_back_at_boundary), "written to a wrong slot", _K_CACHE, (0, BLOCK_SIZE - 1)),
    _fault("padding-in-last-slot", "A row of padding with slot -1 is stored in the last slot of the cache.",
           stored(_with_padding_row), "zeros come back.*written over", _K_CACHE, (0, _LAST_SLOT),
           setting=FaultConfig(schedule="plain", options={"block_size": "7", "num_blocks": "7"}),
           instance="vllm#43810"),
    _fault("k-and-v-swapped", "Keys go to the values' cache, values to the keys'.", stored(_swapped),
           "each other's cache", _K_CACHE, FIRST),
    _fault("cache-bf16", "The cache holds bfloat16 though float32 was asked for.", stored(_in_bfloat16), "bfloat16",
           _K_CACHE, FIRST),
    _fault("k-cached-before-rotary", "The keys are stored as they were before rotary.", _keys_before_rotary,
           "cached before rotary", _K_CACHE, SECOND),
    _fault("wrong-block", "In decode, one block of one request is read from another's place.", _planned(_wrong_block),
           "one block of its history", _ATTENTION, FIRST_DECODE),
    _fault("next-requests-table", "In decode, each request reads through the next one's block table.",
           _planned(_next_table), "block table of another request", _ATTENTION, FIRST_DECODE),
    _fault("past-the-end", "Decode reads one slot beyond the context.", _planned(_past_the_end),
           "past the context length", _ATTENTION, FIRST_DECODE, setting=FaultConfig(options={"debug_checks": "true"})),
    _fault("last-token-unread", "Decode does not read the token it has just stored.", _planned(_without_the_last),
           "does not see itself", _ATTENTION, FIRST_DECODE),
    _fault("read-back-swapped", "What is shown of the cache has two blocks swapped.",
           replacing((PagedAttention, "read_back", _read_back_swapped)), "another position.*read from one", _K_CACHE,
           FIRST),
    _fault("live-block-reused", "A block that a request still reads is given to another.",
           _takes_a_live_block, "another request wrote", _K_CACHE,
           FIRST, setting=FaultConfig(prompts=(tuple(range(40, 60)), tuple(range(70, 85)))), instance="vllm#45357"),
    _fault("double-free", "What a request gives back stands twice in the list of free blocks, and two requests get it.",
           replacing((BlockPool, "free", _free_twice), _UNCHECKED), "another request wrote", _K_CACHE, (2, 0),
           setting=_TWO_AT_A_TIME, instance="sglang#29310"),
    _fault("hash-without-parent", "A block is found by its own tokens, whatever came before.",
           prefixes_changed(_keyed_by_own_tokens, lambda prefix, cached: prefix.token_ids == cached.token_ids),
           "another request wrote", "model.layers.1.k_cache", (3, BLOCK_SIZE),
           setting=FaultConfig(schedule="prefix-hit", prompts=_TWINS)),
    _fault("collision-taken-for-a-hit", "Two prefixes with the same hash are taken for the same.",
           prefixes_changed(_keyed_by_depth, lambda prefix, cached: True), "another request wrote", _K_CACHE, (1, 0),
           setting=FaultConfig(schedule="prefix-hit", prompts=(tuple(range(40, 60)), tuple(range(70, 90))))),
    _fault("hash-of-partial-block",
           "A block can be found as soon as it is begun, under the tokens that it holds by then.",
           replacing((BlockManager, "publish", _published_when_begun)), "hash|published|prefix|holds", None, None,
           suite=block_manager_suite),
    _fault("stale-hash", "The hash of an evicted block still leads to it when it holds something else.",
           replacing((PrefixCache, "forget", _remembers_the_evicted), (BlockPool, "share_prefix", _hit_by_hash_alone)),
           "another request wrote", _K_CACHE, (2, 0),
           setting=_EVICTING, instance="vllm#49125"),
    _fault("hit-without-owner", "A block found in the cache is used without being owned.",
           replacing((BlockPool, "share_prefix", _hit_without_owner)), "free|owner", None, None, setting=_HITS),
    _fault("hit-of-everything", "A prefix hit leaves no token to compute.",
           replacing((BlockManager, "take_prefix", _hit_of_everything)), "at least one row", None, None,
           setting=FaultConfig(schedule="prefix-hit", prompts=(tuple(range(40, 56)), tuple(range(70, 86))))),
    _fault("copy-on-write-forgotten", "A fork writes into the block that it shares.",
           replacing(_ONE_OWNER, (LLMEngine, "_copy_block", lambda original, self, source, target: None)),
           "another request wrote", _K_CACHE, (0, 38), setting=FaultConfig(schedule="forked")),
    _fault("preempted-keeps-its-past", "A preempted request goes on as if its keys and values were still there.",
           replacing((BlockManager, "release", _resumes_as_if_computed)),
           "another request wrote|the row itself was not written there", _K_CACHE, (2, 0),
           setting=FaultConfig(schedule="preempted")),
    _fault("preempted-keeps-its-table",
           "A preempted request resumes with the block table that it had, though its blocks were freed.",
           replacing((BlockManager, "release", _resumes_with_its_table), _UNCHECKED),
           "another request wrote|belongs to two requests", _K_CACHE, _FIRST_GROWN,
           setting=FaultConfig(schedule="preempted"), instance="vllm#5349"),
]  # fmt: skip
