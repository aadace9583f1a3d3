"""Who owns which KV block. Pure Python: no tensor is touched here, and torch is not imported.

Block 0 is the null block: never handed out, it is what padding points at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from reference_engine.errors import BlockError, CapacityError, ConfigError

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0


class BlockPool:
    """A fixed number of blocks, each free or owned by one or more block tables.

    Raises:
        ConfigError: there is not at least the null block and one more, or `block_size` is below one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                "num_blocks is too small", where="BlockPool", expected="at least 2 (one is the null block)",
                actual=num_blocks,
            )  # fmt: skip
        if block_size < 1:
            raise ConfigError("block_size is too small", where="BlockPool", expected="at least 1", actual=block_size)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._num_owners = [0] * num_blocks
        # Freed blocks go to the back: a stale reader meets old content for as long as possible, not the next owner's.
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can be allocated when nothing is."""
        return self.num_blocks - 1

    def num_needed(self, num_tokens: int) -> int:
        """Count the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        """Tell whether `allocate(num_blocks)` would succeed now."""
        return num_blocks <= len(self._free)

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
        blocks = [self._free.popleft() for _ in range(num_blocks)]
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

    def free(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block; a block without owners is free again. All or nothing.

        Raises:
            BlockError: a block is the null block, out of range, already free, or named twice.
        """
        self._check_owned(blocks, "free")
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                self._free.append(block)

    def num_owners(self, block: int) -> int:
        """Count the block tables that own `block`."""
        return self._num_owners[block]

    def check(self) -> None:
        """Verify that free and owned blocks partition the pool.

        Raises:
            BlockError: they do not; this is a bug of the pool or of whoever reached into it.
        """
        free = list(self._free)
        unowned = [block for block in range(1, self.num_blocks) if self._num_owners[block] == 0]
        if sorted(free) != unowned or min(self._num_owners) < 0 or self._num_owners[NULL_BLOCK] != 0:
            raise BlockError("the pool is inconsistent", where="BlockPool.check", expected=unowned, actual=sorted(free))

    def _check_owned(self, blocks: Sequence[int], verb: str) -> None:
        for block in blocks:
            if not NULL_BLOCK < block < self.num_blocks or self._num_owners[block] == 0:
                raise BlockError(
                    f"cannot {verb} block {block}", where=f"BlockPool.{verb}",
                    expected=f"an owned block of 1..{self.num_blocks - 1}", actual=f"{list(blocks)}",
                )  # fmt: skip
        if len(set(blocks)) != len(blocks):
            raise BlockError(f"cannot {verb} a block twice in one call", where=f"BlockPool.{verb}", actual=list(blocks))
