"""Adapter of the reference engine's block manager for the block suite."""

from collections.abc import Mapping, Sequence

from reference_engine.block_manager import BlockManager as EngineBlockManager
from reference_engine.block_pool import NULL_BLOCK, BlockPool
from reference_engine.prefix_cache import HashFunction, Prefix, PrefixCache, sha256_digest
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk
from reference_engine.requests.sequence import Sequence as EngineSequence


class PoolAndCache:
    """Pool, prefix cache and block manager of the reference engine, with the views that suites read."""

    null_block = NULL_BLOCK

    def __init__(self, num_blocks: int, block_size: int, hash_bits: int | None) -> None:
        self.cache = PrefixCache(block_size, _hash_function(hash_bits))
        self.pool = BlockPool(num_blocks + 1, block_size, self.cache)
        self._copies: list[tuple[int, int]] = []
        self.manager = EngineBlockManager(self.pool, lambda source, target: self._copies.append((source, target)))
        self.sequences: dict[int, EngineSequence] = {}

    def block_table(self, request_id: int) -> Sequence[int]:
        """Return a request's blocks."""
        return list(self.sequences[request_id].block_table)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the block copies since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def num_free(self) -> int:
        """Count the blocks that can be allocated."""
        return self.pool.num_free

    def free_list(self) -> list[int]:
        """Return the blocks that can be allocated."""
        return [*self.pool._unused, *self.pool._idle]

    def num_owners(self, block: int) -> int:
        """Count a block's owners."""
        return self.pool.num_owners(block)

    def cached_blocks(self) -> Mapping[int, Sequence[int]]:
        """Return the blocks that a look-up finds, each with all tokens up to its end."""
        cached = {block: prefix for block, prefix in self.cache.prefixes.items() if self.cache.find(prefix) == block}
        return {block: _all_tokens(prefix) for block, prefix in cached.items()}

    def new_sequence(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int, salt: str) -> EngineSequence:
        """Return a request of the engine."""
        params = SamplingParams(max_new_tokens=max_new_tokens, cache_salt=salt)
        return EngineSequence(
            request_id=request_id, token_ids=list(token_ids), num_prompt_tokens=len(token_ids), params=params
        )


class BlockManagerSubject(PoolAndCache):
    """The reference engine's block manager under the block suite."""

    def __init__(self, *, num_blocks: int, block_size: int, hash_bits: int | None = None) -> None:
        super().__init__(num_blocks, block_size, hash_bits)

    def allocate(self, request_id: int, token_ids: Sequence[int], salt: str = "") -> int | None:
        """Pin the cached prefix and grow to all tokens, or do neither."""
        sequence = self.new_sequence(request_id, token_ids, 1, salt)
        num_cached = self.manager.take_prefix(sequence)
        if not self.manager.grow(sequence, len(token_ids)):
            self.manager.release(sequence)
            return None
        self.sequences[request_id] = sequence
        return num_cached

    def append(self, request_id: int, token_id: int) -> bool:
        """Grow by a token."""
        sequence = self.sequences[request_id]
        if not self.manager.grow(sequence, sequence.num_tokens + 1):
            return False
        sequence.token_ids.append(token_id)
        return True

    def computed(self, request_id: int, num_tokens: int) -> None:
        """Publish what has become full."""
        sequence = self.sequences[request_id]
        chunk = ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens)
        sequence.num_computed_tokens = num_tokens
        self.manager.publish([chunk])

    def fork(self, parent_id: int, child_id: int) -> bool:
        """Share all of a request's blocks."""
        parent = self.sequences[parent_id]
        child = parent.fork(child_id, parent.params, seed=0)
        self.manager.share(parent, child)
        self.sequences[child_id] = child
        return True

    def free(self, request_id: int) -> None:
        """Release a request's blocks."""
        self.manager.release(self.sequences.pop(request_id))

    def can_allocate(self, token_ids: Sequence[int], salt: str = "") -> bool:
        """Ask for the blocks that are not shared, and for those that a hit takes out of the idle ones."""
        hits = self._find(token_ids, salt)
        num_idle = sum(self.pool.num_owners(block) == 0 for block in hits)
        return self.pool.can_allocate(self.pool.num_needed(len(token_ids)) - len(hits) + num_idle)

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Count the cached tokens of a prompt."""
        return len(self._find(token_ids, salt)) * self.pool.block_size

    def return_blocks(self, blocks: Sequence[int]) -> None:
        """Free blocks behind the manager's back."""
        self.pool.free(blocks)

    def evict(self, num_blocks: int) -> None:
        """Evict as an allocation would."""
        for _ in range(min(num_blocks, len(self.pool._idle))):
            self.pool._unused.append(self.pool._evict())

    def reset(self) -> None:
        """Forget all prefixes."""
        self.pool.reset_prefix_cache()

    def _find(self, token_ids: Sequence[int], salt: str) -> list[int]:
        chain: list[Prefix] = []
        self.cache.extend(chain, token_ids, len(token_ids) - 1, salt)
        blocks: list[int] = []
        for prefix in chain:
            block = self.cache.find(prefix)
            if block is None:
                break
            blocks.append(block)
        return blocks


def _hash_function(hash_bits: int | None) -> HashFunction:
    if hash_bits is None:
        return sha256_digest
    return lambda data: bytes([sha256_digest(data)[0] & ((1 << hash_bits) - 1)])


def _all_tokens(prefix: Prefix | None) -> list[int]:
    tokens: list[int] = []
    while prefix is not None:
        tokens = [*prefix.token_ids, *tokens]
        prefix = prefix.parent
    return tokens
