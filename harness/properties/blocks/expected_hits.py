"""Hits that a prefix cache must have: invariant 17."""

from collections.abc import Iterable

from harness.properties.blocks.tables import RequestRecord, Tables

NEVER = -1
"""Before all that is noted."""


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
        """Note that something without an owner was given up."""
        self._clock += 1
        self._all_lost_at = self._clock
        self._forget_idle()

    def note_reset(self) -> None:
        """Note that everything was given up."""
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
