"""A block manager in the manner of nano-vllm: chained hashes, owner counts, freed blocks that keep their content.

It is written for these tests, to be unlike the reference engine. The subclasses have the bugs that public ones had.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    number: int
    num_owners: int = 0
    key: int | None = None
    prefix: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Held:
    """What a request holds."""

    token_ids: list[int]
    blocks: list[Block]
    num_computed: int = 0
    keys: list[int] = field(default_factory=list)


class ChainedManager:
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = deque(Block(number) for number in range(num_blocks))
        self.block_of_key: dict[int, Block] = {}
        self.held: dict[int, Held] = {}

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        hits = self._hits(token_ids)
        if not self._has_room(token_ids, hits):
            return None
        for block in hits:
            if block.num_owners == 0:
                self.free_blocks.remove(block)
            block.num_owners += 1
        num_new = -(-len(token_ids) // self.block_size) - len(hits)
        held = self.held[request_id] = Held(list(token_ids), hits + [self._take() for _ in range(num_new)])
        held.num_computed = len(hits) * self.block_size
        return held.num_computed

    def can_allocate(self, token_ids: Sequence[int]) -> bool:
        return self._has_room(token_ids, self._hits(token_ids))

    def append(self, request_id: int, token_id: int) -> bool:
        held = self.held[request_id]
        if self._needs_block(held):
            if not self.free_blocks:
                return False
            held.blocks.append(self._take())
        held.token_ids.append(token_id)
        return True

    def can_append(self, request_id: int) -> bool:
        return bool(self.free_blocks) or not self._needs_block(self.held[request_id])

    def computed(self, request_id: int, num_tokens: int) -> None:
        held = self.held[request_id]
        self._publish(held, held.num_computed // self.block_size, num_tokens // self.block_size)
        held.num_computed = num_tokens

    def free(self, request_id: int) -> None:
        for block in reversed(self.held.pop(request_id).blocks):
            block.num_owners -= 1
            if block.num_owners == 0:
                self.free_blocks.append(block)

    def block_table(self, request_id: int) -> list[int]:
        return [block.number for block in self.held[request_id].blocks]

    def num_free(self) -> int:
        return len(self.free_blocks)

    def free_list(self) -> list[int]:
        return [block.number for block in self.free_blocks]

    def num_owners(self, number: int) -> int:
        owners = {block.number: block.num_owners for held in self.held.values() for block in held.blocks}
        return owners.get(number, 0)

    def lookup(self, token_ids: Sequence[int]) -> int:
        return len(self._hits(token_ids)) * self.block_size

    def cached_blocks(self) -> dict[int, tuple[int, ...]]:
        return {block.number: block.prefix for block in self.block_of_key.values()}

    def _num_full(self, token_ids: Sequence[int]) -> int:
        return (len(token_ids) - 1) // self.block_size

    def _hits(self, token_ids: Sequence[int]) -> list[Block]:
        hits: list[Block] = []
        for key, end in self._keys(token_ids, self._num_full(token_ids)):
            block = self.block_of_key.get(key)
            if block is None or block.prefix != tuple(token_ids[:end]):
                break
            hits.append(block)
        return hits

    def _keys(self, token_ids: Sequence[int], num_blocks: int) -> list[tuple[int, int]]:
        """Return the key of each full block and where it ends."""
        key, keys = 0, []
        for end in range(self.block_size, (num_blocks + 1) * self.block_size, self.block_size):
            key = hash((key, *token_ids[end - self.block_size : end]))
            keys.append((key, end))
        return keys

    def _has_room(self, token_ids: Sequence[int], hits: Sequence[Block]) -> bool:
        num_idle = sum(block.num_owners == 0 for block in hits)
        return -(-len(token_ids) // self.block_size) - len(hits) + num_idle <= len(self.free_blocks)

    def _needs_block(self, held: Held) -> bool:
        return len(held.token_ids) == len(held.blocks) * self.block_size

    def _take(self) -> Block:
        block = self.free_blocks.popleft()
        if block.key is not None and self.block_of_key.get(block.key) is block:
            del self.block_of_key[block.key]
        block.key, block.num_owners = None, 1
        return block

    def _publish(self, held: Held, first: int, stop: int) -> None:
        for block, (key, end) in list(zip(held.blocks, self._keys(held.token_ids, stop), strict=False))[first:]:
            if key not in self.block_of_key:
                block.key, block.prefix = key, tuple(held.token_ids[:end])
                self.block_of_key[key] = block


class BlockSizeOne(ChainedManager):
    """A new block is due when the token count is 1 modulo the block size: never, where that is 1."""

    def _needs_block(self, held: Held) -> bool:
        return (len(held.token_ids) + 1) % self.block_size == 1


class PublishedBeforeCompute(ChainedManager):
    """Hashes are entered when blocks are allocated, and prompts are computed in chunks."""

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        num_cached = super().allocate(request_id, token_ids)
        if num_cached is not None:
            self._publish(self.held[request_id], 0, len(token_ids) // self.block_size)
        return num_cached


class CrashOnExhaustion(ChainedManager):
    """Nobody asks whether there is a free block."""

    def _has_room(self, token_ids: Sequence[int], hits: Sequence[Block]) -> bool:
        return True


class WholePromptCached(ChainedManager):
    """The last block of a prompt counts as cached too: nothing is left to compute."""

    def _num_full(self, token_ids: Sequence[int]) -> int:
        return len(token_ids) // self.block_size


class HitCountedAsFree(ChainedManager):
    """A hit on a free block takes it out of the free ones, which the question for room forgets."""

    def _has_room(self, token_ids: Sequence[int], hits: Sequence[Block]) -> bool:
        return -(-len(token_ids) // self.block_size) - len(hits) <= len(self.free_blocks)


class StaleKey(ChainedManager):
    """A reused block keeps its entry."""

    def _take(self) -> Block:
        block = self.free_blocks.popleft()
        block.num_owners = 1
        return block
