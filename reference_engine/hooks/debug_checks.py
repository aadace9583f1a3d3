"""The invariants of a paged KV cache, verified at every step: for tests, and for developers of the engine.

The oracle is content: for every slot, remember which token was written there after which others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain

from reference_engine.batch import slots_of
from reference_engine.block_pool import NULL_BLOCK, BlockPool
from reference_engine.errors import BlockError
from reference_engine.families.state_cache import StateCache
from reference_engine.kv_cache import KVCache
from reference_engine.prefix_cache import Prefix
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["DebugChecks", "check_pool"]


class DebugChecks:
    """Watches the pool from outside, and fills freed memory with NaN."""

    def __init__(self, cache: KVCache | None, states: StateCache | None = None) -> None:
        self._cache, self._states = cache, states
        self._prefix_ids: dict[tuple[int | str, int], int] = {}
        self._content: dict[int, int] = {}
        """By slot, the prefix whose last token's K and V it holds."""
        if cache is not None:
            cache.data[:, :, NULL_BLOCK + 1 :] = float("nan")
        if states is not None:
            states.fill(range(NULL_BLOCK + 1, states.num_blocks), float("nan"))

    def discard(self, block: int) -> None:
        """Poison a block whose content is given up."""
        if self._cache is not None:
            self._cache.poison_block(block)
            if self._states is not None:
                self._states.fill([block], float("nan"))
            for slot in self._slots(block):
                self._content.pop(slot, None)

    def copy(self, source: int, target: int) -> None:
        """Note that a block was copied."""
        if self._cache is not None:
            for source_slot, slot in zip(self._slots(source), self._slots(target), strict=True):
                if source_slot in self._content:
                    self._content[slot] = self._content[source_slot]

    def before_step(self, chunks: Iterable[ScheduledChunk], pool: BlockPool) -> None:
        """Verify that what is about to be written belongs to its request alone.

        Raises:
            BlockError: it does not.
        """
        for chunk in chunks:
            for slot in slots_of(chunk, pool.block_size):
                block = slot // pool.block_size
                if block == NULL_BLOCK or pool.num_owners(block) != 1:
                    raise BlockError(
                        f"request {chunk.sequence.request_id} would write a block that is not its own",
                        where=f"block {block}", expected="1 owner", actual=pool.num_owners(block),
                    )  # fmt: skip
                self._content.pop(slot, None)  # a draft that is rejected leaves the slot with nobody's prefix

    def after_step(self, chunks: Iterable[ScheduledChunk], running: Seq[Sequence], pool: BlockPool) -> None:
        """Verify owners, tables and content of everything that is live or cached.

        Raises:
            BlockError: an invariant is broken.
        """
        check_pool(pool, [sequence.block_table for sequence in running])
        for sequence in running if self._states is not None else ():
            self._check_state(sequence, pool.block_size)
        if self._cache is None:
            return
        for chunk in chunks:
            ids = self._ids(chunk.sequence.token_ids[: chunk.stop], chunk.sequence.prefix_salt)
            self._content.update(zip(slots_of(chunk, pool.block_size), ids[chunk.start :], strict=True))
        for sequence in running:
            whole = ScheduledChunk(sequence, 0, sequence.num_computed_tokens)
            ids = self._ids(sequence.token_ids[: whole.stop], sequence.prefix_salt)
            self._expect(f"request {sequence.request_id}", slots_of(whole, pool.block_size), ids)
        for block, prefix in pool.prefix_cache.prefixes.items() if pool.prefix_cache is not None else ():
            self._expect(f"the prefix cached in block {block}", self._slots(block), self._ids_of(prefix))

    def _check_state(self, sequence: Sequence, block_size: int) -> None:
        num_tokens = sequence.num_computed_tokens
        block = sequence.block_table[(num_tokens - 1) // block_size] if num_tokens else NULL_BLOCK
        assert self._states is not None
        if self._states.num_tokens[block] != num_tokens:
            raise BlockError(
                f"the state of request {sequence.request_id} is not after its last token", where=f"block {block}",
                expected=f"{num_tokens} tokens", actual=self._states.num_tokens[block],
            )  # fmt: skip

    def _expect(self, what: str, slots: Iterable[int], expected: Seq[int]) -> None:
        actual = [self._content.get(slot) for slot in slots]
        if actual != list(expected):
            position = next(i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b)
            raise BlockError(
                f"a slot of {what} does not hold its own prefix", where=f"position {position}",
                expected=f"prefix {expected[position]}", actual=actual[position],
            )  # fmt: skip

    def _slots(self, block: int) -> range:
        assert self._cache is not None
        return range(block * self._cache.block_size, (block + 1) * self._cache.block_size)

    def _ids(self, token_ids: Iterable[int], salt: str) -> list[int]:
        """Return a number for each prefix of the tokens: two are equal exactly when the tokens are."""
        prefix_id: int | str = salt
        ids = []
        for token_id in token_ids:
            prefix_id = self._prefix_ids.setdefault((prefix_id, token_id), len(self._prefix_ids))
            ids.append(prefix_id)
        return ids

    def _ids_of(self, prefix: Prefix) -> list[int]:
        ancestors = [prefix]
        while ancestors[-1].parent is not None:
            ancestors.append(ancestors[-1].parent)
        token_ids = chain.from_iterable(ancestor.token_ids for ancestor in reversed(ancestors))
        return self._ids(token_ids, prefix.salt)[-len(prefix.token_ids) :]


def check_pool(pool: BlockPool, block_tables: Iterable[Seq[int]] | None = None) -> None:
    """Verify that unused, idle and live blocks partition the pool, and that owners are those of the block tables.

    Args:
        pool: the pool, whose own bookkeeping is read.
        block_tables: those of all requests; None: owners are not compared.

    Raises:
        BlockError: they do not; this is a bug of the pool, or of code that changed it from outside.
    """
    num_owners = pool._num_owners
    expected = [block for block in range(1, pool.num_blocks) if num_owners[block] == 0]
    free = [*pool._unused, *pool._idle]
    _compare("free blocks are not those without an owner", expected, sorted(free))
    _compare("an owner count is impossible", (0, True), (num_owners[NULL_BLOCK], min(num_owners) >= 0))
    cached = set() if pool.prefix_cache is None else set(pool.prefix_cache.prefixes)
    _compare("idle blocks are not the cached ones without an owner", cached & set(free), set(pool._idle))
    if block_tables is not None:
        tables = [list(table) for table in block_tables]
        _compare("a block is twice in one table", [], [table for table in tables if len(set(table)) < len(table)])
        counts = Counter(block for table in tables for block in table)
        owners = {block: number for block, number in enumerate(num_owners) if number}
        _compare("owner counts are not those of the block tables", dict(counts), owners)


def _compare(what: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise BlockError(what, where="BlockPool", expected=expected, actual=actual)
