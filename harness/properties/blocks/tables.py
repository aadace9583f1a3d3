"""The block tables of the live requests, as the code under test reports them, held against invariants 1 to 7 and 15."""

from dataclasses import dataclass, field

from harness.properties.blocks.content import ContentOracle
from harness.properties.core.findings import Violation
from harness.properties.core.subject import Subject

__all__ = ["Request", "Tables"]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the suite knows of one request."""

    request_id: int
    token_ids: list[int]
    salt: str = ""
    names: list[int] = field(default_factory=list)
    """The number of each prefix, see `ContentOracle.extend`."""
    num_computed: int = 0
    table: list[int] = field(default_factory=list)


class Tables:
    """The block tables of live requests, and the content of the slots behind them.

    `are_exact`: a table has room for all of its request's tokens; otherwise for the computed ones at least.
    """

    def __init__(self, subject: Subject, *, num_blocks: int, block_size: int, are_exact: bool = True) -> None:
        self.oracle = ContentOracle(block_size)
        self.live: dict[int, Request] = {}
        self._subject = subject
        self._name = subject.name
        self._num_blocks = num_blocks
        self._are_exact = are_exact
        self._block_size = block_size
        self._null_block = subject.attribute("null_block")
        self._optional = {
            method: subject.offers(method) for method in ("free_list", "num_free", "num_owners", "take_copies")
        }

    def num_needed(self, num_tokens: int) -> int:
        """Count the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def owned(self) -> dict[int, list[Request]]:
        """Return the requests behind each block that is in a table."""
        owners: dict[int, list[Request]] = {}
        for request in self.live.values():
            for block in request.table:
                owners.setdefault(block, []).append(request)
        return owners

    def refresh(self) -> None:
        """Carry out the copies that were asked for, then read all tables anew."""
        if self._optional["take_copies"]:
            for source, target in self._subject.ask(16, "take_copies"):
                self.oracle.copy(source, target)
        for request in self.live.values():
            request.table = list(self._subject.ask(15, "block_table", request.request_id))

    def write(self, request: Request, stop: int) -> None:
        """Compute a request up to `stop`: write the slots of its new positions.

        Raises:
            Violation: one of them is not the request's own.
        """
        self.oracle.extend(request.names, request.token_ids, request.salt)
        owners = self.owned()
        for position in range(request.num_computed, stop):
            index = position // self._block_size
            block, mine = request.table[index], f"{self._name}.block_table({request.request_id})"
            others = [other for other in owners[block] if other is not request]
            if others:
                raise Violation(
                    5,
                    f"request {request.request_id} writes position {position} into block {block}, which request "
                    f"{others[0].request_id} owns too",
                    f"assert {block} not in {self._name}.block_table({others[0].request_id})",
                )
            if block == self._null_block:
                raise Violation(
                    5,
                    f"request {request.request_id} writes position {position} into the null block",
                    f"assert {mine}[{index}] != {block}",
                )
            self.oracle.write(request.table, position, request.names[position])
        request.num_computed = stop

    def check(self) -> None:
        """Verify tables, owners, free blocks and content.

        Raises:
            Violation: an invariant does not hold.
        """
        for request in self.live.values():
            self.check_table(request)
        owners = self.owned()
        for block, requests in owners.items():
            for other in requests[1:]:
                self._check_shared(block, requests[0], other)
        self._check_free(owners)
        if self._optional["num_owners"]:
            self._check_owner_counts(owners)
        for request in self.live.values():
            self.check_content(request, 7)

    def check_table(self, request: Request) -> None:
        """Verify the length of a table, and that no block is twice in it.

        Raises:
            Violation: an invariant does not hold.
        """
        table = request.table
        expected = self.num_needed(len(request.token_ids))
        at_least = expected if self._are_exact else self.num_needed(request.num_computed)
        source = f"{self._name}.block_table({request.request_id})"
        if not at_least <= len(table) <= expected:
            raise Violation(
                15,
                f"request {request.request_id} has {len(request.token_ids)} tokens, {request.num_computed} of them "
                f"computed, in {len(table)} blocks of {self._block_size}",
                f"assert {at_least} <= len({source}) <= {expected}",
            )
        if len(set(table)) < len(table):
            raise Violation(
                3,
                f"a block is twice in the table of request {request.request_id}: {table}",
                f"assert len(set({source})) == len({source})",
            )
        if self._null_block is not None and self._null_block in table:
            raise Violation(
                5, f"the null block is in the table of request {request.request_id}: {table}",
                f"assert {self._null_block} not in {source}",
            )  # fmt: skip

    def _check_shared(self, block: int, first: Request, second: Request) -> None:
        indices = [request.table.index(block) for request in (first, second)]
        prefixes = [self._prefix(request, index) for request, index in zip((first, second), indices, strict=True)]
        if indices[0] != indices[1] or prefixes[0] != prefixes[1]:
            raise Violation(
                3,
                f"block {block} is at index {indices[0]} of request {first.request_id} and at index {indices[1]} of "
                f"request {second.request_id}, behind other tokens",
                f"assert {block} not in {self._name}.block_table({second.request_id})",
            )

    def _prefix(self, request: Request, index: int) -> tuple[str, list[int]]:
        """Return the tokens up to the end of a block that are in it or are about to be."""
        end = (index + 1) * self._block_size
        return request.salt, request.token_ids[: end if self._are_exact else min(end, request.num_computed)]

    def _check_free(self, owners: dict[int, list[Request]]) -> None:
        num_free = self._num_blocks - len(owners)
        if self._optional["free_list"]:
            free = list(self._subject.ask(1, "free_list"))
            source = f"{self._name}.free_list()"
            for block in owners.keys() & set(free):
                request = owners[block][0]
                raise Violation(
                    4,
                    f"request {request.request_id} points at block {block}, which is free",
                    f"assert not set({self._name}.block_table({request.request_id})) & set({source})",
                )
            if len(set(free)) < len(free):
                raise Violation(
                    1, f"a block is twice among the free ones: {free}", f"assert len(set({source})) == len({source})"
                )
            if len(free) != num_free:
                raise Violation(
                    1,
                    f"{len(owners)} of {self._num_blocks} blocks are live, and {len(free)} are free: {free}",
                    f"assert len({source}) == {num_free}",
                )
        if self._optional["num_free"]:
            actual = self._subject.ask(1, "num_free")
            if actual != num_free:
                raise Violation(
                    1,
                    f"{len(owners)} of {self._num_blocks} blocks are live, and {actual} are counted as free",
                    f"assert {self._name}.num_free() == {num_free}",
                )

    def _check_owner_counts(self, owners: dict[int, list[Request]]) -> None:
        for block, requests in owners.items():
            actual = self._subject.ask(2, "num_owners", block)
            if actual != len(requests):
                raise Violation(
                    2,
                    f"block {block} is in {len(requests)} tables and counts {actual} owners",
                    f"assert {self._name}.num_owners({block}) == {len(requests)}",
                )

    def check_content(self, request: Request, invariant: int) -> None:
        """Verify that what counts as computed is there.

        Raises:
            Violation: of `invariant`: a slot holds something else.
        """
        self.oracle.extend(request.names, request.token_ids, request.salt)
        names = request.names[: request.num_computed]
        position = self.oracle.first_wrong(request.table, names)
        if position is not None:
            index = position // self._block_size
            block = request.table[index]
            actual = self.oracle.read(request.table, position)
            raise Violation(
                invariant,
                f"position {position} of request {request.request_id} reads block {block}, where K and V of "
                f"{self.oracle.describe(actual)} are, not of {self.oracle.describe(names[position])}",
                f"assert {self._name}.block_table({request.request_id})[{index}] != {block}",
            )
