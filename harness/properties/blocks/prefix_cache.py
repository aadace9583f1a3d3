"""Entries of a prefix cache: which block may be given up first, and which prefix must be found.

Invariants 8, 9, 11, 17 and 18.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.properties.blocks.tables import Owner, RequestRecord, Tables
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.subject import Subject

Place = tuple[int, int, int]
"""A request, a group of layers, and an index in its block table."""


class CacheEntries:
    """The answers of `cached_blocks()`, compared with the content of the blocks and from call to call.

    `note` is called with violations after which the example can go on.
    """

    def __init__(
        self,
        subject: Subject,
        tables: Tables,
        block_size: int,
        note: Callable[[Invariant, str, str], None],
        *,
        may_lose_duplicates: bool = False,
    ) -> None:
        self._subject = subject
        self._note = note
        self._may_lose_duplicates = may_lose_duplicates
        self._source = f"{subject.name}.cached_blocks()"
        self._tables = tables
        self._block_size = block_size
        self._cached: dict[int, tuple[int, ...]] = {}
        self._places: dict[int, set[Place]] = {}
        """By block that was in a table, where it was."""
        self._clock = 0
        self._released_at: dict[int, tuple[int, int]] = {}
        """By block, when its last owner left it, and minus its index in that owner's table."""
        self._group_of: dict[int, int] = {}
        """By block that was released, the group of layers that it was last used for."""

    def note_released(self, request: RequestRecord) -> None:
        """Note that a request gives its tables up."""
        self._clock += 1
        for group, table in enumerate(request.tables):
            self._released_at.update({block: (self._clock, -index) for index, block in enumerate(table)})
            self._group_of.update(dict.fromkeys(table, group))

    def note_used(self, request: RequestRecord) -> None:
        """Note that a request has its tables."""
        for table in request.tables:
            for block in table:
                self._released_at.pop(block, None)

    def note_lookup(self, token_ids: Sequence[int]) -> None:
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
        places = {
            block: {(owner.request.request_id, owner.group, owner.index) for owner in owners}
            for block, owners in self._tables.owners().items()
        }
        if not may_forget_owned:
            self._check_owned_stay(cached, places)
        idle = (self._cached.keys() - self._places.keys()) & self._released_at.keys()
        prefixes = set(cached.values())  # an entry that has moved to an equal block is not evicted
        for group in {self._group_of[block] for block in idle}:
            of_group = {block for block in idle if self._group_of[block] == group}
            kept = {block for block in of_group if cached.get(block) == self._cached[block]}
            evicted = {block for block in of_group - kept if self._cached[block] not in prefixes}
            self._check_order(evicted, kept - places.keys())
        for block in list(self._released_at):
            if block in places or cached.get(block) != self._cached.get(block):
                del self._released_at[block]  # it has been used since
        self._cached, self._places = cached, places

    def check_entries(self) -> dict[int, tuple[int, ...]]:
        """Verify that each entry's block holds the entry's tokens, and return the entries.

        Raises:
            Violation: one does not.
        """
        listed: Mapping[int, Sequence[int]] = self._subject.ask(Invariant.COMPUTED_HITS, "cached_blocks")
        cached = {block: tuple(prefix) for block, prefix in listed.items()}
        owners = self._tables.owners()
        for block, prefix in cached.items():
            self._check_entry(block, prefix, owners.get(block, ()))
        return cached

    def _check_entry(self, block: int, prefix: tuple[int, ...], owners: Sequence[Owner]) -> None:
        content = self._tables.oracle.tokens_in(block)
        if content == prefix and not len(prefix) % self._block_size:
            return  # an owner that took the block over may not have been told how far it goes
        for owner in owners:
            request = owner.request
            if (owner.index + 1) * self._block_size > request.num_computed:
                raise Violation(
                    Invariant.COMPUTED_ENTRIES,
                    f"block {block} is found under {list(prefix)}, while request {request.request_id} has computed "
                    f"{request.num_computed} tokens of it",
                    f"assert {block} not in {self._source}",
                )
        raise Violation(
            Invariant.COMPUTED_HITS,
            f"block {block} is found under {list(prefix)} and holds K and V of "
            f"{'less than a block' if content is None else list(content)}",
            f"assert {block} not in {self._source}",
        )

    def _check_owned_stay(self, cached: Mapping[int, tuple[int, ...]], places: Mapping[int, set[Place]]) -> None:
        for block in sorted(self._cached.keys() - cached.keys()):
            prefix = self._cached[block]
            is_in_use = bool(self._places.get(block, set()) & places.get(block, set()))
            if is_in_use and not (self._may_lose_duplicates and prefix in cached.values()):
                self._note(
                    Invariant.EVICTED_ENTRY,
                    f"the entry of block {block} for {list(prefix)} went away, though the block is in use (where "
                    "that is meant, declare may_lose_duplicates = True)",
                    f"assert {block} in {self._source}",
                )

    def _check_order(self, evicted: set[int], kept: set[int]) -> None:
        if not evicted or not kept:
            return
        last = max(evicted, key=self._released_at.__getitem__)
        first = min(kept, key=self._released_at.__getitem__)
        if self._released_at[last] > self._released_at[first]:
            self._note(
                Invariant.EVICTION_ORDER,
                f"block {last} with {list(self._cached[last])} was evicted before block {first} with "
                f"{list(self._cached[first])}, which was used less recently or stands after it",
                f"assert {last} in {self._source} or {first} not in {self._source}",
            )


NEVER = -1
"""A time before all notes."""


class ExpectedHits:
    """Prefixes that were computed and released, and that no eviction can have reached since.

    An eviction is seen when a block that holds a prefix is handed out again. How many more blocks it took is the
    cache's own choice, so that all prefixes without an owner are then no longer expected. Nor is a prefix that two
    requests have computed, once the block of one is gone: caches differ in which of the two they keep.
    """

    def __init__(self, tables: Tables, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._clock = 0
        self._computed_at: dict[tuple[int, int], int] = {}
        """By request and prefix, when it was computed or found."""
        self._overwritten_at: dict[int, int] = {}
        """By prefix, when a block that held it was last handed out again."""
        self._all_lost_at = 0
        self._expected: set[int] = set()

    def note_computed(self, request: RequestRecord, like: RequestRecord | None = None) -> None:
        """Note the full blocks of a request that are computed; `like`: when they were for another."""
        for prefix in self._full_prefixes(request):
            since = self._clock if like is None else self._computed_at[like.request_id, prefix]
            self._computed_at.setdefault((request.request_id, prefix), since)

    def note_unfindable(self, request: RequestRecord) -> None:
        """Note blocks of a request that the cache need not find: their content came from elsewhere."""
        for prefix in self._full_prefixes(request):
            self._computed_at[request.request_id, prefix] = NEVER

    def note_released(self, request: RequestRecord, *, num_kept: int) -> None:
        """Note that a request gives its blocks up; the cache has to keep those of its first `num_kept` tokens."""
        for index, prefix in enumerate(self._full_prefixes(request)):
            since = self._computed_at.pop((request.request_id, prefix))
            is_kept = (index + 1) * self._block_size <= num_kept
            if is_kept and since >= self._all_lost_at and since >= self._overwritten_at.get(prefix, 0):
                self._expected.add(prefix)

    def note_allocated(self, blocks: Iterable[int]) -> None:
        """Note blocks that were given to a request for new content."""
        held = (self._tables.oracle.last_prefix_in(block) for block in blocks)
        overwritten = {prefix for prefix in held if prefix is not None}
        if overwritten:
            self._clock += 1
            self._overwritten_at.update(dict.fromkeys(overwritten, self._clock))
        if overwritten & self._expected:
            self._expected -= overwritten
            self._forget_idle()

    def note_eviction(self) -> None:
        """Note an eviction of something without an owner."""
        self._clock += 1
        self._all_lost_at = self._clock
        self._forget_idle()

    def note_reset(self) -> None:
        """Note an eviction of everything."""
        self.note_eviction()
        self._expected.clear()

    def num_tokens(self, token_ids: list[int], salt: str) -> int:
        """Count the leading tokens that a request must find, one at least being left to compute."""
        prefixes: list[int] = []
        self._tables.oracle.extend(prefixes, token_ids[:-1], salt)
        num_blocks = 0
        for prefix in prefixes[self._block_size - 1 :: self._block_size]:
            if prefix not in self._expected:
                break
            num_blocks += 1
        return num_blocks * self._block_size

    def _forget_idle(self) -> None:
        self._expected &= {prefix for request in self._tables.live.values() for prefix in self._full_prefixes(request)}

    def _full_prefixes(self, request: RequestRecord) -> list[int]:
        return request.prefixes[: request.num_computed][self._block_size - 1 :: self._block_size]
