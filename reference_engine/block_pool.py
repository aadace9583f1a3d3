"""Who owns which KV block. Pure Python: no tensor is touched here, and torch is not imported.

A block is live (in one or more block tables), unused, or idle: without an owner, but kept for the prefix that it holds
until its place is needed. Block 0 is the null block: never handed out, it is what padding points at.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from reference_engine.errors import BlockError, CapacityError, ConfigError
from reference_engine.prefix_cache import Prefix, PrefixCache

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0


class BlockPool:
    """A fixed number of blocks, each free (unused or idle) or owned by one or more block tables.

    Without a `prefix_cache` no block is ever idle. `on_discard` is called with each block whose content is given up.

    Raises:
        ConfigError: there is not at least the null block and one more, or `block_size` is below one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        on_discard: Callable[[int], None] | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ConfigError(
                "num_blocks is too small", where="BlockPool", expected="at least 2 (one is the null block)",
                actual=num_blocks,
            )  # fmt: skip
        if block_size < 1:
            raise ConfigError("block_size is too small", where="BlockPool", expected="at least 1", actual=block_size)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self._on_discard = on_discard
        self._num_owners = [0] * num_blocks
        # Freed blocks go to the back: a stale reader meets old content for as long as possible, not the next owner's.
        self._unused = deque(range(NULL_BLOCK + 1, num_blocks))
        # Least recently used first; of one table, the tail before the head. Taking one out of the middle is O(1).
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._unused) + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Blocks that can be allocated when nothing is."""
        return self.num_blocks - 1

    def num_needed(self, num_tokens: int) -> int:
        """Count the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        """Tell whether `allocate(num_blocks)` would succeed now."""
        return num_blocks <= len(self._unused) + len(self._idle)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks, each with one owner. All or nothing.

        Raises:
            CapacityError: fewer blocks are free; nothing has changed.
        """
        if not self.can_allocate(num_blocks):
            raise CapacityError(
                "out of KV blocks",
                where="BlockPool.allocate",
                expected=f"{num_blocks} free blocks of {self.block_size} tokens",
                actual=f"{self.num_free} free of {self.num_usable}",
                hint="Wait for a request to finish, or raise num_blocks.",
            )
        blocks = [self._unused.popleft() if self._unused else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_owners[block] = 1
        return blocks

    def append(self, block_table: list[int], num_tokens: int) -> None:
        """Grow `block_table` at its end, in place, until it holds `num_tokens` tokens. All or nothing.

        Raises:
            CapacityError: too few blocks are free; neither pool nor table has changed.
        """
        block_table.extend(self.allocate(max(0, self.num_needed(num_tokens) - len(block_table))))

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block. All or nothing.

        Raises:
            BlockError: a block is the null block, out of range, free, or named twice.
        """
        self._check_owned(blocks, "share")
        for block in blocks:
            self._num_owners[block] += 1

    def share_prefix(self, chain: Iterable[Prefix]) -> list[int]:
        """Find the blocks that hold the longest cached part of `chain` and add an owner to each, in one step."""
        blocks: list[int] = []
        for prefix in chain if self.prefix_cache is not None else ():
            block = self.prefix_cache.find(prefix)  # type: ignore[union-attr]
            if block is None:
                break
            if self._num_owners[block] == 0:
                del self._idle[block]
            self._num_owners[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, prefix: Prefix) -> None:
        """Let others find an owned block, full and computed.

        Raises:
            BlockError: it has no owner.
        """
        self._check_owned([block], "publish")
        if self.prefix_cache is not None:
            self.prefix_cache.publish(block, prefix)

    def unpublish(self, block: int) -> None:
        """Let nobody find an owned block any more: it is about to be written again.

        Raises:
            BlockError: it has no owner.
        """
        self._check_owned([block], "unpublish")
        if self.prefix_cache is not None:
            self.prefix_cache.forget(block)

    def free(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block; a block without owners is free again. All or nothing.

        Raises:
            BlockError: a block is the null block, out of range, already free, or named twice.
        """
        self._check_owned(blocks, "free")
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                if self.prefix_cache is not None and block in self.prefix_cache:
                    self._idle[block] = None
                else:
                    self._unused.append(block)
                    self._discard(block)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes; blocks that are owned stay so."""
        if self.prefix_cache is not None:
            while self._idle:
                self._unused.append(self._evict())
            for block in list(self.prefix_cache.prefixes):
                self.prefix_cache.forget(block)

    def num_owners(self, block: int) -> int:
        """Count the block tables that own `block`."""
        return self._num_owners[block]

    def _evict(self) -> int:
        """Give up the content of the idle block that is least likely to be asked for again."""
        assert self.prefix_cache is not None
        block, _ = self._idle.popitem(last=False)
        self.prefix_cache.forget(block)
        self._discard(block)
        return block

    def _discard(self, block: int) -> None:
        if self._on_discard is not None:
            self._on_discard(block)

    def _check_owned(self, blocks: Sequence[int], verb: str) -> None:
        for block in blocks:
            if not NULL_BLOCK < block < self.num_blocks or self._num_owners[block] == 0:
                raise BlockError(
                    f"cannot {verb} block {block}", where=f"BlockPool.{verb}",
                    expected=f"an owned block of 1..{self.num_blocks - 1}", actual=f"{list(blocks)}",
                )  # fmt: skip
        if len(set(blocks)) != len(blocks):
            raise BlockError(f"cannot {verb} a block twice in one call", where=f"BlockPool.{verb}", actual=list(blocks))
