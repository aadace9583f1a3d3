"""The block tables of live requests, as the code under test reports them, checked against invariants 1 to 7 and 15.

The content oracle knows for every physical slot the token prefix whose K and V were written there last. K and V of a
position depend on all tokens up to it, so a slot is right for a request exactly when it was written for an equal
prefix. Prefixes are numbered: comparing two is comparing two integers. Groups of layers with tables of their own take
blocks from one pool and write different K and V, so a slot holds a group and a prefix.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from harness.properties.blocks.adapter import PoolCapabilities
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.subject import Subject

Content = tuple[int, int]
"""A group of layers, and the number of a prefix."""


class ContentOracle:
    """The expected content of the slots of a cache."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int | str, int], int] = {}
        self._prefixes: list[tuple[int | str, int]] = []
        self._content: dict[tuple[Hashable, int], Content] = {}

    def extend(self, prefixes: list[int], token_ids: Sequence[int], salt: str) -> None:
        """Lengthen a request's list of prefix numbers, in place, to one for each of its tokens.

        Two numbers are equal exactly when the salt and all tokens up to there are.
        """
        parent: int | str = prefixes[-1] if prefixes else salt
        for token_id in token_ids[len(prefixes) :]:
            key = (parent, token_id)
            if key not in self._numbers:
                self._numbers[key] = len(self._prefixes)
                self._prefixes.append(key)
            parent = self._numbers[key]
            prefixes.append(parent)

    def describe(self, content: Content | None) -> str:
        """Describe the content of a slot."""
        if content is None:
            return "nothing"
        group, prefix = content
        salt, tokens = self.spell(prefix)
        of_group = f" in group {group}" if group else ""
        return f"{list(tokens)}" + (f" of salt {salt!r}" if salt else "") + of_group

    def tokens_in(self, block: int) -> tuple[int, ...] | None:
        """Return all tokens up to the end of a block; None unless its slots hold one prefix in order."""
        contents = [self._content.get((block, offset)) for offset in range(self.block_size)]
        for content, following in pairwise(contents):
            if content is None or following is None or content[0] != following[0]:
                return None
            if self._prefixes[following[1]][0] != content[1]:
                return None
        last = contents[-1]
        return None if last is None else self.spell(last[1])[1]

    def last_prefix_in(self, block: int) -> int | None:
        """Return the prefix in the last slot of a block; None if nothing was written."""
        content = self._content.get((block, self.block_size - 1))
        return None if content is None else content[1]

    def write(self, block: int, offset: int, content: Content) -> None:
        """Write K and V of one position."""
        self._content[block, offset] = content

    def read(self, table: Sequence[int], position: int) -> Content | None:
        """Return what a position's slot holds; None if nothing was ever written."""
        return self._content.get((table[position // self.block_size], position % self.block_size))

    def copy(self, source: Hashable, target: Hashable) -> None:
        """Copy all slots of a block."""
        for offset in range(self.block_size):
            content = self._content.get((source, offset))
            if content is None:
                self._content.pop((target, offset), None)
            else:
                self._content[target, offset] = content

    def first_wrong(
        self, table: Sequence[int], prefixes: Sequence[int], group: int, positions: Iterable[int]
    ) -> int | None:
        """Return the first of some positions whose slot does not hold its own prefix, None if all do."""
        size, content = self.block_size, self._content
        for position in positions:
            slot = (table[position // size], position % size)
            if content.get(slot) != (group, prefixes[position]):
                return position
        return None

    def spell(self, prefix: int) -> tuple[str, tuple[int, ...]]:
        """Return the salt of a numbered prefix, and its tokens."""
        tokens: list[int] = []
        parent: int | str = prefix
        while isinstance(parent, int):
            parent, token_id = self._prefixes[parent]
            tokens.append(token_id)
        return parent, tuple(reversed(tokens))


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """The suite's own record of one request."""

    request_id: int
    token_ids: list[int]
    salt: str = ""
    prefixes: list[int] = field(default_factory=list)
    """The number of each prefix, see `ContentOracle.extend`."""
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    """Its block table in each group of layers."""

    def leave(self) -> None:
        """Note that it holds no blocks any more."""
        self.tables = [[] for _ in self.tables]

    @property
    def table(self) -> list[int]:
        """The only table if there are no groups."""
        return self.tables[0]


@dataclass(frozen=True, slots=True)
class Owner:
    """One place of a block in a table."""

    request: RequestRecord
    group: int
    index: int


class Tables:
    """The block tables of live requests, and the content of the slots behind them.

    `are_exact`: a table has room for all of its request's tokens; otherwise for the computed ones at least, and for
    `num_lookahead` tokens more than there are at most. `knows_all`: all requests that hold blocks are in `live`.
    """

    def __init__(
        self,
        subject: Subject,
        pool: PoolCapabilities,
        *,
        num_blocks: int,
        block_size: int,
        are_exact: bool = True,
        num_lookahead: int = 0,
    ) -> None:
        self.oracle = ContentOracle(block_size)
        self.live: dict[int, RequestRecord] = {}
        self.knows_all = True
        self._subject = subject
        self._pool = pool
        self._num_blocks = num_blocks
        self._are_exact = are_exact
        self._num_lookahead = num_lookahead
        self._block_size = block_size
        self._null_block = subject.attribute("null_block")
        self._offers = {
            method: subject.offers(method) for method in ("free_list", "num_free", "num_owners", "take_copies")
        }

    def num_needed(self, num_tokens: int) -> int:
        """Count the blocks that hold `num_tokens` tokens in one group."""
        return -(-num_tokens // self._block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether the whole pool holds `num_tokens` tokens of one request, in all groups."""
        return self.num_needed(num_tokens) * self._pool.num_groups <= self._num_blocks

    def source(self, request: RequestRecord, group: int) -> str:
        """Return the call that gives a table, as source text."""
        arguments = f"{request.request_id}, {group}" if self._pool.has_groups else f"{request.request_id}"
        return f"{self._subject.name}.block_table({arguments})"

    def owners(self) -> dict[int, list[Owner]]:
        """Return the places of each block that is in a table."""
        owners: dict[int, list[Owner]] = {}
        for request in self.live.values():
            for group, table in enumerate(request.tables):
                for index, block in enumerate(table):
                    if block != self._null_block:
                        owners.setdefault(block, []).append(Owner(request, group, index))
        return owners

    def refresh(self) -> None:
        """Carry out the copies that were asked for, then read all tables anew."""
        if self._offers["take_copies"]:
            for source, target in self._subject.ask(Invariant.FREE_AND_COPY, "take_copies"):
                self.oracle.copy(source, target)
        for request in self.live.values():
            old, request.tables = request.tables, self._read(request.request_id)
            if not self._offers["take_copies"]:
                self._assume_copies(old, request)

    def _read(self, request_id: int) -> list[list[int]]:
        if not self._pool.has_groups:
            return [list(self._subject.ask(Invariant.TABLE_LENGTH, "block_table", request_id))]
        groups = range(self._pool.num_groups)
        return [list(self._subject.ask(Invariant.TABLE_LENGTH, "block_table", request_id, group)) for group in groups]

    def _assume_copies(self, old: Sequence[Sequence[int]], request: RequestRecord) -> None:
        """Take a block that another has replaced as copied: without `take_copies` that is unknown."""
        for before, after in zip(old, request.tables, strict=False):
            for source, target in zip(before, after, strict=False):
                if source != target and target != self._null_block:
                    self.oracle.copy(source, target)

    def write(self, request: RequestRecord, stop: int, *, cached_tokens: Mapping[int, int] | None = None) -> None:
        """Compute a request up to `stop`: write the slots of its new positions in every group.

        `cached_tokens` are the tokens that requests which start in the same step find in the cache. A step may compute
        these for another request, since every layer writes K and V before it reads them.

        Raises:
            Violation: one of them is not the request's own.
        """
        self.oracle.extend(request.prefixes, request.token_ids, request.salt)
        owners = self.owners()
        for group, table in enumerate(request.tables):
            for position in range(request.num_computed, stop):
                index, offset = divmod(position, self._block_size)
                self._check_written(request, group, index, position, owners, cached_tokens or {})
                self.oracle.write(table[index], offset, (group, request.prefixes[position]))
        request.num_computed = stop

    def _check_written(
        self,
        request: RequestRecord,
        group: int,
        index: int,
        position: int,
        owners: Mapping[int, Sequence[Owner]],
        cached_tokens: Mapping[int, int],
    ) -> None:
        block, source = request.tables[group][index], self.source(request, group)
        doing = f"request {request.request_id} writes position {position} into"
        if block == self._null_block:
            raise Violation(Invariant.SHARED_WRITES, f"{doing} the null block", f"assert {source}[{index}] != {block}")
        for owner in owners[block]:
            is_found = position < cached_tokens.get(owner.request.request_id, 0)
            if owner.request is not request and not is_found:
                raise Violation(
                    Invariant.SHARED_WRITES,
                    f"{doing} block {block}, which request {owner.request.request_id} owns too",
                    f"assert {block} not in {self.source(owner.request, owner.group)}",
                )

    def check(self) -> None:
        """Verify tables, owners, free blocks and content.

        Raises:
            Violation: an invariant does not hold.
        """
        for request in self.live.values():
            self.check_table(request)
        owners = self.owners()
        for block, places in owners.items():
            for place in places[1:]:
                self._check_shared(block, places[0], place)
        self._check_free(owners)
        if self._offers["num_owners"] and self.knows_all:
            self._check_owner_counts(owners)
        for request in self.live.values():
            self.check_content(request, Invariant.SLOT_CONTENT)

    def check_table(self, request: RequestRecord) -> None:
        """Verify the length of a request's tables, and that no block is twice in one.

        Raises:
            Violation: an invariant does not hold.
        """
        for group in range(len(request.tables)):
            self._check_length(request, group)
            self._check_entries(request, group)

    def _check_length(self, request: RequestRecord, group: int) -> None:
        table, source = request.tables[group], self.source(request, group)
        most = self.num_needed(len(request.token_ids) + self._num_lookahead)
        least = most if self._are_exact else self.num_needed(request.num_computed)
        if not least <= len(table) <= most:
            raise Violation(
                Invariant.TABLE_LENGTH,
                f"request {request.request_id} has {len(request.token_ids)} tokens, {request.num_computed} of them "
                f"computed, in {len(table)} blocks of {self._block_size}",
                f"assert {least} <= len({source}) <= {most}",
            )

    def _check_entries(self, request: RequestRecord, group: int) -> None:
        table, source = request.tables[group], self.source(request, group)
        blocks = [block for block in table if block != self._null_block]
        if len(blocks) < len(table) and self._pool.windows[group] is None:
            raise Violation(
                Invariant.SHARED_WRITES,
                f"the null block is in the table of request {request.request_id}: {table}",
                f"assert {self._null_block} not in {source}",
            )
        if len(set(blocks)) < len(blocks):
            left_out = "" if len(blocks) == len(table) else f" - {{{self._null_block}}}"
            raise Violation(
                Invariant.TABLE_SHARING,
                f"a block is twice in the table of request {request.request_id}: {table}",
                f"assert len(set({source}){left_out}) == {len(blocks)}",
            )

    def _check_shared(self, block: int, first: Owner, second: Owner) -> None:
        places = [(owner.group, owner.index) for owner in (first, second)]
        if places[0] != places[1] or self._tokens_behind(first) != self._tokens_behind(second):
            raise Violation(
                Invariant.TABLE_SHARING,
                f"block {block} is at {self._place(first)} and at {self._place(second)}, after other tokens",
                f"assert {block} not in {self.source(second.request, second.group)}",
            )

    def _place(self, owner: Owner) -> str:
        group = f" in group {owner.group}" if self._pool.has_groups else ""
        return f"index {owner.index} of request {owner.request.request_id}{group}"

    def _tokens_behind(self, owner: Owner) -> tuple[str, list[int]]:
        """Return the tokens up to the end of a block that are in it or are about to be."""
        request, end = owner.request, (owner.index + 1) * self._block_size
        return request.salt, request.token_ids[: end if self._are_exact else min(end, request.num_computed)]

    def _check_free(self, owners: Mapping[int, Sequence[Owner]]) -> None:
        num_free = self._num_blocks - len(owners)
        if self._offers["free_list"]:
            self._check_free_list(owners, num_free)
        if self._offers["num_free"]:
            actual = self._subject.ask(Invariant.POOL_PARTITION, "num_free")
            if not (actual == num_free if self.knows_all else actual <= num_free):
                raise Violation(
                    Invariant.POOL_PARTITION,
                    f"{len(owners)} of {self._num_blocks} blocks are live, and {actual} are counted as free",
                    f"assert {self._subject.name}.num_free() {self._relation} {num_free}",
                )

    @property
    def _relation(self) -> str:
        return "==" if self.knows_all else "<="

    def _check_free_list(self, owners: Mapping[int, Sequence[Owner]], num_free: int) -> None:
        free = list(self._subject.ask(Invariant.POOL_PARTITION, "free_list"))
        source = f"{self._subject.name}.free_list()"
        for block in sorted(owners.keys() & set(free)):
            owner = owners[block][0]
            raise Violation(
                Invariant.LIVE_BLOCKS,
                f"request {owner.request.request_id} points at block {block}, which is free",
                f"assert not set({self.source(owner.request, owner.group)}) & set({source})",
            )
        if len(set(free)) < len(free):
            raise Violation(
                Invariant.POOL_PARTITION,
                f"a block is twice among the free ones: {free}",
                f"assert len(set({source})) == len({source})",
            )
        if not (len(free) == num_free if self.knows_all else len(free) <= num_free):
            raise Violation(
                Invariant.POOL_PARTITION,
                f"{len(owners)} of {self._num_blocks} blocks are live, and {len(free)} are free: {free}",
                f"assert len({source}) {self._relation} {num_free}",
            )

    def _check_owner_counts(self, owners: Mapping[int, Sequence[Owner]]) -> None:
        for block, places in owners.items():
            actual = self._subject.ask(Invariant.OWNER_COUNTS, "num_owners", block)
            if actual != len(places):
                raise Violation(
                    Invariant.OWNER_COUNTS,
                    f"block {block} is in {len(places)} tables and counts {actual} owners",
                    f"assert {self._subject.name}.num_owners({block}) == {len(places)}",
                )

    def check_content(self, request: RequestRecord, invariant: Invariant, *, first_query: int | None = None) -> None:
        """Verify that what counts as computed is there, as far back as each group attends to.

        `first_query` is the first position that attends to it; None: the next one that is computed.

        Raises:
            Violation: of `invariant`: a slot holds something else.
        """
        self.oracle.extend(request.prefixes, request.token_ids, request.salt)
        for group, table in enumerate(request.tables):
            window = self._pool.windows[group]
            query = request.num_computed if first_query is None else first_query
            first = 0 if window is None else max(0, query - window + 1)
            positions = range(first, request.num_computed)
            position = self.oracle.first_wrong(table, request.prefixes, group, positions)
            if position is not None:
                self._raise_wrong(request, group, position, invariant)

    def _raise_wrong(self, request: RequestRecord, group: int, position: int, invariant: Invariant) -> None:
        index, table = position // self._block_size, request.tables[group]
        block, expected = table[index], (group, request.prefixes[position])
        raise Violation(
            invariant,
            f"position {position} of request {request.request_id} reads block {block}, where K and V of "
            f"{self.oracle.describe(self.oracle.read(table, position))} are, not of {self.oracle.describe(expected)}",
            f"assert {self.source(request, group)}[{index}] != {block}",
        )
