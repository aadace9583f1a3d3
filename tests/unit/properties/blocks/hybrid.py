"""A block manager for layers with full attention and layers with a sliding window, in the manner of vLLM's hybrid one.

Each group of layers has tables of its own over one pool. A group with a window gives up blocks that no later position
attends to: their places in the table become the null block. It is written for these tests; the subclasses have bugs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

NULL = 0
Key = tuple[int, tuple[int, ...]]
"""A group, and all tokens up to the end of a block."""


@dataclass(slots=True, eq=False)
class Held:
    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int = 0
    published: list[int] = field(default_factory=list)
    """By group, how many leading blocks are in the cache, or were."""


class HybridManager:
    null_block = NULL
    windows: tuple[int | None, ...] = (None, 3)
    pool_sizes = tuple(range(2, 15))

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = deque(range(1, num_blocks + 1))
        self.owners = [0] * (num_blocks + 1)
        self.block_of: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.held: dict[int, Held] = {}

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        num_hits = self._num_hits(token_ids)
        num_blocks = -(-len(token_ids) // self.block_size)
        hits = [self._hits(group, token_ids, num_hits) for group in range(len(self.windows))]
        num_idle = sum(self.owners[block] == 0 for block in {b for table in hits for b in table if b != NULL})
        if (num_blocks - num_hits) * len(self.windows) + num_idle > len(self.free_blocks):
            return None
        for block in (block for table in hits for block in table if block != NULL):
            self._add_owner(block)
        tables = [table + [self._take() for _ in range(num_blocks - num_hits)] for table in hits]
        self.held[request_id] = Held(list(token_ids), tables, num_hits * self.block_size)
        return num_hits * self.block_size

    def append(self, request_id: int, token_id: int) -> bool:
        held = self.held[request_id]
        if self.needs_blocks(held):
            if len(self.free_blocks) < len(self.windows):
                return False
            for table in held.tables:
                table.append(self._take())
        held.token_ids.append(token_id)
        return True

    def can_append(self, request_id: int) -> bool:
        return len(self.free_blocks) >= len(self.windows) or not self.needs_blocks(self.held[request_id])

    def needs_blocks(self, held: Held) -> bool:
        return len(held.token_ids) == len(held.tables[0]) * self.block_size

    def computed(self, request_id: int, num_tokens: int) -> None:
        held = self.held[request_id]
        for group, table in enumerate(held.tables):
            for index in range(held.num_computed // self.block_size, num_tokens // self.block_size):
                key = self._key(group, held.token_ids, index)
                if key not in self.block_of:
                    self.block_of[key], self.key_of[table[index]] = table[index], key
            self._give_up(group, table, num_tokens)
        held.num_computed = num_tokens

    def free(self, request_id: int) -> None:
        for table in self.held.pop(request_id).tables:
            for block in reversed(table):
                self._disown(block)

    def block_table(self, request_id: int, group: int) -> list[int]:
        return list(self.held[request_id].tables[group])

    def num_free(self) -> int:
        return len(self.free_blocks)

    def free_list(self) -> list[int]:
        return list(self.free_blocks)

    def num_owners(self, block: int) -> int:
        return self.owners[block]

    def lookup(self, token_ids: Sequence[int]) -> int:
        return self._num_hits(token_ids) * self.block_size

    def cached_blocks(self) -> dict[int, tuple[int, ...]]:
        return {block: key[1] for key, block in self.block_of.items()}

    def _key(self, group: int, token_ids: Sequence[int], index: int) -> Key:
        return group, tuple(token_ids[: (index + 1) * self.block_size])

    def _num_hits(self, token_ids: Sequence[int]) -> int:
        """Return how many leading blocks a request need not compute: what each group needs of them is there."""
        most = (len(token_ids) - 1) // self.block_size
        return next(number for number in range(most, -1, -1) if self._has_all(token_ids, number))

    def _has_all(self, token_ids: Sequence[int], number: int) -> bool:
        return all(
            self._key(group, token_ids, index) in self.block_of
            for group in range(len(self.windows))
            for index in range(self._first_needed(group, number * self.block_size), number)
        )

    def _hits(self, group: int, token_ids: Sequence[int], number: int) -> list[int]:
        first = min(self._first_needed(group, number * self.block_size), number)
        return [NULL] * first + [self.block_of[self._key(group, token_ids, index)] for index in range(first, number)]

    def _first_needed(self, group: int, num_computed: int) -> int:
        """Return the index of the first block that the position after the computed ones attends to."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def _give_up(self, group: int, table: list[int], num_computed: int) -> None:
        for index in range(min(self._first_needed(group, num_computed), len(table))):
            if table[index] != NULL:
                self._disown(table[index])
                table[index] = NULL

    def _add_owner(self, block: int) -> None:
        if self.owners[block] == 0:
            self.free_blocks.remove(block)
        self.owners[block] += 1

    def _disown(self, block: int) -> None:
        if block == NULL:
            return
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.free_blocks.append(block)

    def _take(self) -> int:
        block = self.free_blocks.popleft()
        if block in self.key_of:
            del self.block_of[self.key_of.pop(block)]
        self.owners[block] = 1
        return block


class WindowTooShort(HybridManager):
    """A block is given up while the next position still attends to its last slot."""

    def _first_needed(self, group: int, num_computed: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, num_computed - window + 2) // self.block_size


class GivenUpAndListed(HybridManager):
    """A block that is given up stays in the table, and is given up again in the end."""

    def _give_up(self, group: int, table: list[int], num_computed: int) -> None:
        for block in table[: self._first_needed(group, num_computed)]:
            if self.owners[block] == 1:
                self._disown(block)


class GivenUpAndLost(HybridManager):
    """A block that is given up is forgotten."""

    def _give_up(self, group: int, table: list[int], num_computed: int) -> None:
        for index in range(min(self._first_needed(group, num_computed), len(table))):
            table[index] = NULL


class HitOfOneGroup(HybridManager):
    """What the groups with a window need is taken for granted."""

    def _has_all(self, token_ids: Sequence[int], number: int) -> bool:
        return all(self._key(0, token_ids, index) in self.block_of for index in range(number))

    def _hits(self, group: int, token_ids: Sequence[int], number: int) -> list[int]:
        first = min(self._first_needed(group, number * self.block_size), number)
        keys = [self._key(group, token_ids, index) for index in range(first, number)]
        return [NULL] * first + [self.block_of.get(key, NULL) for key in keys]


class GroupsShareKeys(HybridManager):
    """Blocks of one group are found for another."""

    def _key(self, group: int, token_ids: Sequence[int], index: int) -> Key:
        return super()._key(0, token_ids, index)


class NullBlockFreed(HybridManager):
    """The null block goes back to the pool with the others."""

    def _disown(self, block: int) -> None:
        if block == NULL:
            self.free_blocks.append(block)
        else:
            super()._disown(block)
