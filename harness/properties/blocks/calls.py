"""The calls of an engine to a block manager; each answer is compared with the earlier ones.

Some block managers also move the blocks of a request to host memory and back.
"""

from collections.abc import Sequence
from typing import Any

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED, PoolCapabilities
from harness.properties.blocks.prefix_cache import CacheEntries, ExpectedHits
from harness.properties.blocks.requests import CacheRequests, known
from harness.properties.blocks.tables import RequestRecord, Tables
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.machine import action, one_of
from harness.properties.core.search import Hits


class BlockManagerCalls(CacheRequests):
    """A block manager with the suite's record of its requests, tables and cache."""

    def __init__(self, factory: Any, hits: Hits | None = None) -> None:
        super().__init__(factory, hits)
        self.pool = PoolCapabilities.of(self.adapter)

    def start(self, num_blocks: int, block_size: int, hash_bits: int | None, num_host_blocks: int) -> None:
        """Make a manager."""
        options = {"hash_bits": hash_bits, "num_host_blocks": num_host_blocks}
        self.make("manager", REQUIRED, OPTIONAL, options, num_blocks=num_blocks, block_size=block_size)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks if self.adapter.takes("num_host_blocks") else None
        self.tables = Tables(self.subject, self.pool, num_blocks=num_blocks, block_size=block_size)
        self.hits = ExpectedHits(self.tables, block_size)
        self.entries = CacheEntries(
            self.subject, self.tables, block_size, self.note, may_lose_duplicates=self.pool.may_lose_duplicates
        )
        self.is_reset = False

    @property
    def reports_hits(self) -> bool:
        """Whether a look-up is offered: without one, a manager that finds nothing may have no prefix cache."""
        return self.offers["lookup"]

    def live(self) -> list[RequestRecord]:
        """Return the requests that hold blocks."""
        return list(self.tables.live.values())

    def begin_request(self, request: RequestRecord, *, looks_up: bool, computes: bool) -> bool:
        """Allocate a request's blocks and perhaps compute all its tokens; tell whether there was room."""
        token_ids, salted = request.token_ids, self.salted(request.salt)
        looked_up = self.look_up(token_ids, request.salt) if looks_up and self.offers["lookup"] else None
        expected = self.ask_optional(Invariant.ROOM, "can_allocate", list(token_ids), **salted)
        fits = not self.tables.live and self.tables.fits(len(token_ids))
        before = self.free_blocks()
        num_cached = self.subject.do(Invariant.ROOM, "allocate", request.request_id, list(token_ids), **salted)
        self.check_answer(
            num_cached is not None, expected, fits=fits, what=f"room for {len(token_ids)} tokens",
            question=f"can_allocate({token_ids}{''.join(f', {key}={value!r}' for key, value in salted.items())})",
        )  # fmt: skip
        if num_cached is None:
            self.check_unchanged(before)
            self.entries.note_lookup(token_ids)
            return False
        self._check_found(num_cached, token_ids, request.salt)
        self.check_same(looked_up, num_cached)
        request.num_computed = num_cached
        self.tables.live[request.request_id] = request
        self.tables.refresh()
        self.entries.note_used(request)
        self.tables.check_table(request)
        self._check_cached_content(request)
        self.hits.note_computed(request)
        self.tables.check()
        self.hits.note_allocated(request.table[num_cached // self.block_size :])
        if computes or not self.offers["computed"] or not self.pool.chunks_prompts:
            self.compute_up_to(request, len(request.token_ids))
        return True

    def look_up(self, token_ids: Sequence[int], salt: str) -> int:
        """Ask how much of a prompt is cached, and return it."""
        num_cached: int = self.subject.do(Invariant.LOOKUP, "lookup", list(token_ids), **self.salted(salt))
        self.entries.note_lookup(token_ids)
        self._check_found(num_cached, token_ids, salt)
        return num_cached

    def _check_found(self, num_cached: int, token_ids: Sequence[int], salt: str) -> None:
        at_least = 0 if self.collides else self.hits.num_tokens(list(token_ids), salt)
        is_noted = self.offers["lookup"] and not self.pool.has_groups
        self.check_found(num_cached, token_ids, (at_least, is_noted))

    def _check_cached_content(self, request: RequestRecord) -> None:
        """Distinguish the kinds of a wrong hit: not computed yet, or another prefix."""
        oracle = self.tables.oracle
        oracle.extend(request.prefixes, request.token_ids, request.salt)
        position = oracle.first_wrong(request.table, request.prefixes, 0, range(request.num_computed))
        if position is not None and not self.pool.has_groups:
            block = request.table[position // self.block_size]
            others = [holder for holder in self.live() if holder is not request and block in holder.table]
            is_early = oracle.read(request.table, position) is None or any(
                holder.num_computed <= position for holder in others
            )
            self.tables.check_content(request, Invariant.COMPUTED_HITS if is_early else Invariant.EQUAL_HITS)
        self.tables.check_content(request, Invariant.EQUAL_HITS)

    def append_token(self, request: RequestRecord, token_id: int) -> bool:
        """Append a token, and tell whether there was room."""
        expected = self.ask_optional(Invariant.ROOM, "can_append", request.request_id)
        num_tokens = len(request.token_ids) + 1
        fits = len(self.tables.live) == 1 and self.tables.fits(num_tokens)
        before, old_table = self.free_blocks(), set(request.table)
        has_room = bool(self.subject.do(Invariant.ROOM, "append", request.request_id, token_id))
        self.check_answer(
            has_room, expected, fits=fits, what=f"room for token {num_tokens - 1}",
            question=f"can_append({request.request_id})",
        )  # fmt: skip
        if not has_room:
            self.check_unchanged(before)
            return False
        request.token_ids.append(token_id)
        self.tables.refresh()
        self.hits.note_allocated(set(request.table) - old_table)
        self.tables.check()
        return True

    def compute_up_to(self, request: RequestRecord, stop: int) -> None:
        """Compute up to `stop`; without `computed`, what is allocated counts as computed."""
        if stop > request.num_computed:
            self.tables.write(request, stop)
            self.hits.note_computed(request)
            if self.offers["computed"]:
                self.subject.do(Invariant.COMPUTED_HITS, "computed", request.request_id, stop)
                self.tables.refresh()

    def release(self, request: RequestRecord, method: str, *, is_kept: bool = False) -> None:
        """Release a request's blocks; `is_kept`: their content can be found again."""
        self.hits.note_released(request, num_kept=request.num_computed if is_kept else 0)
        self.entries.note_released(request)
        del self.tables.live[request.request_id]
        request.leave()
        self.subject.do(Invariant.REMOVAL, method, request.request_id)

    def check_answer(self, has_room: bool, expected: object, *, fits: bool, what: str, question: str) -> None:
        """Compare an allocation with the answer that was given before."""
        if expected is not None and bool(expected) != has_room:
            self.note(
                Invariant.ROOM,
                f"{question} said {expected}, and there was {'' if has_room else 'no '}{what}",
                "assert expected == (result not in (None, False))",
                f"expected = {self.subject.name}.{question}",
            )
        if fits and not has_room:
            raise Violation(
                Invariant.ROOM, f"the pool is free, and there was no {what}", "assert result not in (None, False)"
            )


class Swapping(BlockManagerCalls):
    """Move whole requests: `swap_out` and `swap_in` return which block is copied where."""

    def start(self, num_blocks: int, block_size: int, hash_bits: int | None, num_host_blocks: int) -> None:
        """Make a manager with nothing in host memory."""
        super().start(num_blocks, block_size, hash_bits, num_host_blocks)
        self.swapped: dict[int, RequestRecord] = {}
        self.host_blocks: dict[int, list[int]] = {}
        """By request, the blocks of host memory that hold its content."""

    @action(
        when=lambda self: self.offers["swap_out"] and self.offers["swap_in"],
        request_id=one_of(lambda self: self.caught_up()),
    )
    def swap_out(self, request_id: int) -> None:
        """Move a request to host memory."""
        request = known(self.caught_up(), request_id)
        before = self.free_blocks()
        copies = self.subject.do(Invariant.ROOM, "swap_out", request_id)
        if copies is None:
            self.check_unchanged(before)
            return
        for source, target in copies:
            self.tables.oracle.copy(source, ("host", target))
        self.hits.note_released(request, num_kept=0)
        self.entries.note_released(request)
        del self.tables.live[request_id]
        request.leave()
        self.swapped[request_id] = request
        self.host_blocks[request_id] = [target for _, target in copies]

    @action(request_id=one_of(lambda self: list(self.swapped.values())))
    def swap_in(self, request_id: int) -> None:
        """Move a request back, with all that it had computed."""
        request = known(self.swapped.values(), request_id)
        before = self.free_blocks()
        fits = not self.tables.live and self.tables.fits(len(request.token_ids))
        copies = self.subject.do(Invariant.ROOM, "swap_in", request_id)
        self.check_answer(
            copies is not None, None, fits=fits, what=f"room for request {request_id}", question="",
        )  # fmt: skip
        if copies is None:
            self.check_unchanged(before)
            return
        self.hits.note_allocated(target for _, target in copies)
        for source, target in copies:
            self.tables.oracle.copy(("host", source), target)
        self._forget(request_id)
        self.tables.live[request_id] = request
        self.tables.refresh()
        self.tables.check()
        self.hits.note_unfindable(request)

    @action(request_id=one_of(lambda self: list(self.swapped.values())))
    def abort_swapped(self, request_id: int) -> None:
        """Drop a request that is in host memory."""
        request = known(self.swapped.values(), request_id)
        self.subject.do(Invariant.REMOVAL, "abort" if self.offers["abort"] else "free", request_id)
        self._forget(request_id)
        self.finished.append(request)

    def check_host_blocks(self) -> None:
        """Verify that no block of host memory belongs to two requests, and that the free ones are the others.

        Raises:
            Violation: an invariant does not hold.
        """
        used = [block for blocks in self.host_blocks.values() for block in blocks]
        if len(set(used)) < len(used):
            raise Violation(
                Invariant.TABLE_SHARING,
                f"a block of host memory holds two requests: {self.host_blocks}",
                "assert False",
            )
        if self.offers["num_free_host"] and self.num_host_blocks is not None:
            expected = self.num_host_blocks - len(used)
            actual = self.subject.ask(Invariant.POOL_PARTITION, "num_free_host")
            if actual != expected:
                raise Violation(
                    Invariant.POOL_PARTITION,
                    f"{len(used)} of {self.num_host_blocks} blocks of host memory are used, and {actual} are counted "
                    "as free",
                    f"assert {self.subject.name}.num_free_host() == {expected}",
                )

    def drain_swapped(self) -> None:
        """Finish the requests in host memory."""
        for request_id in list(self.swapped):
            self.abort_swapped(request_id)
            self.check()

    def _forget(self, request_id: int) -> None:
        del self.swapped[request_id], self.host_blocks[request_id]
