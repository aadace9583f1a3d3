"""The block tables of requests: how they grow, what they share, and what others may find of them.

The pool knows blocks, the scheduler knows turns; here the two meet, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reference_engine.block_pool import BlockPool
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["BlockManager"]


class BlockManager:
    """Gives requests the blocks that they need.

    `copy_block` is called with a source and a target when a request is about to write a block that it shares: the
    content must be copied at once, before anything else is written.
    """

    def __init__(self, pool: BlockPool, copy_block: Callable[[int, int], None] = lambda source, target: None) -> None:
        self.pool = pool
        self._cache = pool.prefix_cache
        self._copy_block = copy_block

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let the table hold `num_tokens`, with nothing shared among what will be written; or change nothing."""
        table, pool = sequence.block_table, self.pool
        num_new = pool.num_needed(num_tokens) - len(table)
        tail = sequence.num_computed_tokens // pool.block_size
        must_copy = tail < len(table) and pool.num_owners(table[tail]) > 1
        if not pool.can_allocate(num_new + must_copy):
            return False
        if must_copy:
            (target,) = pool.allocate(1)
            self._copy_block(table[tail], target)
            pool.free([table[tail]])
            table[tail] = target
        elif tail < len(table):
            pool.unpublish(table[tail])  # a request that went back writes over tokens that the block's prefix names
        table.extend(pool.allocate(num_new))
        sequence.num_writable_tokens = len(table) * pool.block_size
        return True

    def take_prefix(self, sequence: Sequence) -> int:
        """Give a request that is about to start its longest cached prefix, and return how many tokens that is."""
        if self._cache is not None:
            num_tokens = sequence.num_tokens - 1  # at least one is computed, or there would be no logits to sample from
            self._cache.extend(sequence.prefixes, sequence.token_ids, num_tokens, sequence.prefix_salt)
            chain = sequence.prefixes[: num_tokens // self._cache.block_size]
            sequence.block_table.extend(self.pool.share_prefix(chain))
            sequence.num_computed_tokens = len(sequence.block_table) * self._cache.block_size
        return sequence.num_computed_tokens

    def publish(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Let others find the blocks that computed chunks have filled."""
        if self._cache is None:
            return
        block_size = self._cache.block_size
        # Of hundreds of decoding requests few fill a block: they are told by one division, before anything else.
        for chunk in [chunk for chunk in chunks if chunk.stop % block_size < chunk.stop - chunk.start]:
            sequence = chunk.sequence
            self._cache.extend(sequence.prefixes, sequence.token_ids, chunk.stop, sequence.prefix_salt)
            for index in range(chunk.start // block_size, chunk.stop // block_size):
                self.pool.publish(sequence.block_table[index], sequence.prefixes[index])

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind what is computed, whose tokens were rejected or taken back."""
        table, num_kept = sequence.block_table, self.pool.num_needed(sequence.num_computed_tokens)
        self.pool.free(table[num_kept:])
        del table[num_kept:]
        sequence.num_writable_tokens = 0  # others may own the last block, or find it: `grow` sees to that

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` own all that `parent` has computed, until one of them writes."""
        self.pool.share(parent.block_table)
        child.block_table = parent.block_table[:]
        child.num_computed_tokens = parent.num_computed_tokens
        parent.num_writable_tokens = child.num_writable_tokens = 0

    def release(self, sequence: Sequence) -> None:
        """Take a request's blocks away."""
        self.pool.free(sequence.block_table)
        sequence.reset()
