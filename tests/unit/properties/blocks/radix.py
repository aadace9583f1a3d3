"""A block manager in the manner of a radix tree: one node a block, locks on the path of each request, lazy frees.

Blocks of requests are inserted in the tree once they are computed. Where another request has computed the same prefix
meanwhile, its block is kept and the request is pointed at it. Freed blocks wait in a list until somebody needs one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    prefix: tuple[int, ...] = ()
    block: int = -1
    parent: "Node | None" = None
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """What a request holds: a locked path in the tree, then blocks of its own."""

    token_ids: list[int]
    table: list[int]
    path: list[Node]


class RadixManager:
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.freed_lately: list[int] = []
        self.root = Node()
        self.held: dict[int, Held] = {}
        self.clock = 0

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        path = self._match(token_ids)
        self._lock(path)
        blocks = self._take(-(-len(token_ids) // self.block_size) - len(path))
        if blocks is None:
            self._unlock(path)
            return None
        self.held[request_id] = Held(list(token_ids), [node.block for node in path] + blocks, path)
        return len(path) * self.block_size

    def can_allocate(self, token_ids: Sequence[int]) -> bool:
        path = self._match(token_ids)
        num_idle = sum(node.num_locks == 0 for node in path)
        return -(-len(token_ids) // self.block_size) - len(path) + num_idle <= self.num_free()

    def append(self, request_id: int, token_id: int) -> bool:
        held = self.held[request_id]
        if len(held.token_ids) == len(held.table) * self.block_size:
            blocks = self._take(1)
            if blocks is None:
                return False
            held.table += blocks
        held.token_ids.append(token_id)
        return True

    def computed(self, request_id: int, num_tokens: int) -> None:
        held = self.held[request_id]
        for index in range(len(held.path), num_tokens // self.block_size):
            parent = held.path[-1] if held.path else self.root
            tokens = tuple(held.token_ids[index * self.block_size : (index + 1) * self.block_size])
            node = parent.children.get(tokens)
            if node is None:
                node = parent.children[tokens] = Node(parent.prefix + tokens, held.table[index], parent)
            else:
                self._replace(held, index, node.block)
            self._lock([node])
            held.path.append(node)

    def free(self, request_id: int) -> None:
        held = self.held.pop(request_id)
        self._unlock(held.path)
        self.freed_lately += held.table[len(held.path) :]

    abort = free

    def block_table(self, request_id: int) -> list[int]:
        return list(self.held[request_id].table)

    def num_free(self) -> int:
        return len(self.free_list())

    def free_list(self) -> list[int]:
        return self.free_blocks + self.freed_lately + [node.block for node in self._nodes() if node.num_locks == 0]

    def lookup(self, token_ids: Sequence[int]) -> int:
        return len(self._match(token_ids)) * self.block_size

    def cached_blocks(self) -> dict[int, tuple[int, ...]]:
        return {node.block: node.prefix for node in self._nodes()}

    def evict(self, num_blocks: int) -> int:
        for num_evicted in range(num_blocks):
            leaves = [node for node in self._nodes() if self._is_evictable(node)]
            if not leaves:
                return num_evicted
            node = min(leaves, key=lambda node: node.last_used)
            assert node.parent is not None
            del node.parent.children[node.prefix[-self.block_size :]]
            self.free_blocks.append(node.block)
        return num_blocks

    def reset(self) -> None:
        self.evict(10**9)

    def _is_evictable(self, node: Node) -> bool:
        return not node.children and node.num_locks == 0

    def _nodes(self) -> Iterator[Node]:
        nodes = list(self.root.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            yield node

    def _match(self, token_ids: Sequence[int]) -> list[Node]:
        path, node = [], self.root
        for end in range(self.block_size, len(token_ids), self.block_size):
            child = node.children.get(tuple(token_ids[end - self.block_size : end]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _lock(self, path: Sequence[Node]) -> None:
        for node in path:
            node.num_locks += 1

    def _unlock(self, path: Sequence[Node]) -> None:
        self.clock += 1
        for node in path:
            node.num_locks -= 1
            node.last_used = self.clock

    def _take(self, num_blocks: int) -> list[int] | None:
        if num_blocks > self.num_free():
            return None
        self.free_blocks += self.freed_lately
        self.freed_lately = []
        self.evict(num_blocks - len(self.free_blocks))
        blocks, self.free_blocks = self.free_blocks[:num_blocks], self.free_blocks[num_blocks:]
        return blocks

    def _replace(self, held: Held, index: int, block: int) -> None:
        """Give up the request's own block for the one that is in the tree."""
        self.freed_lately.append(held.table[index])
        held.table[index] = block


class DuplicateFreed(RadixManager):
    """The duplicate is freed, and the request's table still points at it."""

    def _replace(self, held: Held, index: int, block: int) -> None:
        self.freed_lately.append(held.table[index])


class DuplicateLeaked(RadixManager):
    """The request is pointed at the tree's block, and its own is forgotten."""

    def _replace(self, held: Held, index: int, block: int) -> None:
        held.table[index] = block


class LockedEvicted(RadixManager):
    """Eviction looks for leaves and not for locks."""

    def _is_evictable(self, node: Node) -> bool:
        return not node.children


class InnerNodeEvicted(RadixManager):
    """Eviction takes any unlocked node: what hangs below it is lost."""

    def _is_evictable(self, node: Node) -> bool:
        return node.num_locks == 0


class AbortKeepsLocks(RadixManager):
    """An aborted request's path stays locked."""

    def abort(self, request_id: int) -> None:
        held = self.held.pop(request_id)
        self.freed_lately += held.table[len(held.path) :]


class CrashOnExhaustion(RadixManager):
    """Blocks are taken without asking whether there are any."""

    def _take(self, num_blocks: int) -> list[int] | None:
        self.free_blocks += self.freed_lately
        self.freed_lately = []
        self.evict(num_blocks - len(self.free_blocks))
        return [self.free_blocks.pop(0) for _ in range(num_blocks)]
