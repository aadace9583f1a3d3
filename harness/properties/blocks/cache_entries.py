"""Entries of a prefix cache, and the block that it may give up first: invariants 8, 9, 11 and 18."""

from collections.abc import Callable, Mapping, Sequence

from harness.properties.blocks.tables import Owner, RequestRecord, Tables
from harness.properties.core.findings import Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.subject import Subject

Place = tuple[int, int, int]
"""A request, a group of layers, and an index in its block table."""


class CacheEntries:
    """The answers of `cached_blocks()`, held against the content of the blocks, and compared from call to call.

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
                del self._released_at[block]  # it has been used since, perhaps for a moment
        self._cached, self._places = cached, places

    def check_entries(self) -> dict[int, tuple[int, ...]]:
        """Verify that each entry's block holds what it is found under, and return the entries.

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
