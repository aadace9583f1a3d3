"""What a prefix cache must still find, and which block it may give up first: invariants 8, 9, 11, 17 and 18."""

from collections.abc import Iterable, Mapping, Sequence

from harness.properties.blocks.tables import Request, Tables
from harness.properties.core.findings import Violation
from harness.properties.core.subject import Subject

__all__ = ["CachedBlocks", "Findable"]


class Findable:
    """Prefixes that were computed and released, and that no eviction can have reached since.

    An eviction is seen when a block that holds a prefix is handed out again. How many more blocks it took is the
    cache's own choice, so that all prefixes without an owner are then no longer asked for. Nor is a prefix that two
    requests have computed, once the block of one is gone: caches differ in which of the two they keep.
    """

    def __init__(self, tables: Tables, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._clock = 0
        self._noted: dict[tuple[int, int], int] = {}
        """By request and prefix, when it was computed or found."""
        self._lost: dict[int, int] = {}
        """By prefix, when a block that held it was last handed out again."""
        self._all_lost = 0
        self._expected: set[int] = set()

    def note(self, request: Request, like: Request | None = None) -> None:
        """Note the full blocks of a request that are computed; `like`: when they were for another."""
        for name in self._full_names(request):
            since = self._clock if like is None else self._noted[like.request_id, name]
            self._noted.setdefault((request.request_id, name), since)

    def release(self, request: Request, *, is_kept: bool) -> None:
        """Note that a request gives its blocks up; `is_kept`: the cache has to keep their content."""
        for name in self._full_names(request):
            since = self._noted.pop((request.request_id, name))
            if is_kept and since >= self._all_lost and since >= self._lost.get(name, 0):
                self._expected.add(name)

    def hand_out(self, blocks: Iterable[int]) -> None:
        """Note blocks that were given to a request for new content."""
        contents = (self._tables.oracle.read([block], self._block_size - 1) for block in blocks)
        overwritten = {name for name in contents if name is not None}
        if overwritten:
            self._clock += 1
            self._lost.update(dict.fromkeys(overwritten, self._clock))
        if overwritten & self._expected:
            self._expected -= overwritten
            self._forget_idle()

    def evict(self) -> None:
        """Note that something without an owner was given up."""
        self._clock += 1
        self._all_lost = self._clock
        self._forget_idle()

    def reset(self) -> None:
        """Note that everything was given up."""
        self.evict()
        self._expected.clear()

    def num_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        """Count the leading tokens that a request must find, one at least being left to compute."""
        names: list[int] = []
        self._tables.oracle.extend(names, token_ids[:-1], salt)
        num_blocks = 0
        for name in names[self._block_size - 1 :: self._block_size]:
            if name not in self._expected:
                break
            num_blocks += 1
        return num_blocks * self._block_size

    def _forget_idle(self) -> None:
        self._expected &= {name for request in self._tables.live.values() for name in self._full_names(request)}

    def _full_names(self, request: Request) -> list[int]:
        return request.names[: request.num_computed][self._block_size - 1 :: self._block_size]


class CachedBlocks:
    """What `cached_blocks()` lists, held against the content of the blocks, and watched from call to call."""

    def __init__(self, subject: Subject, tables: Tables, block_size: int) -> None:
        self._subject = subject
        self._source = f"{subject.name}.cached_blocks()"
        self._tables = tables
        self._block_size = block_size
        self._cached: dict[int, tuple[int, ...]] = {}
        self._owned: set[int] = set()
        self._clock = 0
        self._released_at: dict[int, tuple[int, int]] = {}
        """By block, when its last owner left it, and minus its index in that owner's table."""

    def release(self, request: Request) -> None:
        """Note that a request gives its table up."""
        self._clock += 1
        self._released_at.update({block: (self._clock, -index) for index, block in enumerate(request.table)})

    def touch(self, token_ids: Sequence[int]) -> None:
        """Note a look-up: whether it counts as a use is the cache's own choice, so the order is no longer known."""
        for block, prefix in self._cached.items():
            if tuple(token_ids[: len(prefix)]) == prefix:
                self._released_at.pop(block, None)

    def check(self, *, may_forget_owned: bool = False) -> None:
        """Verify the entries, and those that went away since the last call.

        Raises:
            Violation: an entry is wrong, or should still be there, or another should have gone first.
        """
        cached = self.check_entries()
        owned = set(self._tables.owned())
        if not may_forget_owned:
            self._check_owned_stay(cached, owned)
        self._check_order(cached, owned)
        self._cached, self._owned = cached, owned

    def check_entries(self) -> dict[int, tuple[int, ...]]:
        """Verify that each entry's block holds what it is found under, and return the entries.

        Raises:
            Violation: one does not.
        """
        listed: Mapping[int, Sequence[int]] = self._subject.ask(8, "cached_blocks")
        cached = {block: tuple(prefix) for block, prefix in listed.items()}
        for block, prefix in cached.items():
            self._check_entry(block, prefix)
        return cached

    def _check_entry(self, block: int, prefix: tuple[int, ...]) -> None:
        for request in self._tables.live.values():
            if block in request.table and (request.table.index(block) + 1) * self._block_size > request.num_computed:
                raise Violation(
                    9,
                    f"block {block} is found under {list(prefix)}, while request {request.request_id} has computed "
                    f"{request.num_computed} tokens of it",
                    f"assert {block} not in {self._source}",
                )
        content = self._tables.oracle.tokens_in(block)
        if content is None or len(prefix) % self._block_size or content != prefix:
            raise Violation(
                8,
                f"block {block} is found under {list(prefix)} and holds K and V of "
                f"{'less than a block' if content is None else list(content)}",
                f"assert {block} not in {self._source}",
            )

    def _check_owned_stay(self, cached: Mapping[int, object], owned: set[int]) -> None:
        for block in (self._cached.keys() & self._owned & owned) - cached.keys():
            raise Violation(
                11,
                f"the entry of block {block} for {list(self._cached[block])} went away, though the block is in use",
                f"assert {block} in {self._source}",
            )

    def _check_order(self, cached: Mapping[int, object], owned: set[int]) -> None:
        idle = (self._cached.keys() - self._owned) & self._released_at.keys()
        evicted, kept = idle - cached.keys(), (idle & cached.keys()) - owned
        if evicted and kept:
            last = max(evicted, key=self._released_at.__getitem__)
            first = min(kept, key=self._released_at.__getitem__)
            if self._released_at[last] > self._released_at[first]:
                raise Violation(
                    18,
                    f"block {last} with {list(self._cached[last])} was evicted before block {first} with "
                    f"{list(self._cached[first])}, which was used less recently or stands behind it",
                    f"assert {last} in {self._source} or {first} not in {self._source}",
                )
