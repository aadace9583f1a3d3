"""The calls of an engine to a block manager; each answer is compared with the earlier ones."""

from collections.abc import Sequence
from typing import Any

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED
from harness.properties.blocks.cache_entries import CacheEntries
from harness.properties.blocks.capabilities import PoolCapabilities
from harness.properties.blocks.expected_hits import ExpectedHits
from harness.properties.blocks.tables import RequestRecord, Tables
from harness.properties.core.adapter import NamedAdapter
from harness.properties.core.findings import PropertyFinding, Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.machine import Machine, NotApplicable
from harness.properties.core.subject import Subject

__all__ = ["BlockManagerCalls"]


class BlockManagerCalls(Machine):
    """A block manager, and what is known of its requests, tables and cache."""

    def __init__(self, factory: Any) -> None:
        super().__init__()
        self.adapter = NamedAdapter.of(factory)
        self.pool = PoolCapabilities.of(self.adapter)

    def start(self, num_blocks: int, block_size: int, hash_bits: int | None, num_host_blocks: int) -> None:
        """Make a manager."""
        if num_blocks not in self.pool.pool_sizes or block_size not in self.pool.block_sizes:
            raise NotApplicable
        options = {"hash_bits": hash_bits, "num_host_blocks": num_host_blocks}
        taken = {name: value for name, value in options.items() if value is not None and self.adapter.takes(name)}
        self.collides = "hash_bits" in taken
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_host_blocks = num_host_blocks if "num_host_blocks" in taken else None
        self.subject = Subject(
            self.adapter, "manager", required=REQUIRED, num_blocks=num_blocks, block_size=block_size, **taken
        )
        self.offers = {method: self.subject.offers(method) for method in OPTIONAL}
        self.has_salts = self.subject.takes("allocate", "salt")
        self.tables = Tables(self.subject, self.pool, num_blocks=num_blocks, block_size=block_size)
        self.hits = ExpectedHits(self.tables, block_size)
        self.entries = CacheEntries(
            self.subject, self.tables, block_size, self.note, may_lose_duplicates=self.pool.may_lose_duplicates
        )
        self.history: list[list[int]] = []
        self.preempted: dict[int, RequestRecord] = {}
        self.finished: list[RequestRecord] = []
        self.num_requests = 0
        self.is_reset = False
        self.num_hits = 0
        """Allocations and look-ups that found something."""
        self.first_miss: PropertyFinding | None = None
        """The first that found nothing where a prefix was computed before, and nothing was evicted since."""

    def live(self) -> list[RequestRecord]:
        """Return the requests that hold blocks."""
        return list(self.tables.live.values())

    def caught_up(self) -> list[RequestRecord]:
        """Return those whose tokens are all computed."""
        return [request for request in self.live() if request.num_computed == len(request.token_ids)]

    def behind(self) -> list[RequestRecord]:
        """Return those with tokens to compute."""
        return [request for request in self.live() if request.num_computed < len(request.token_ids)]

    def new_request(self, request_id: int, token_ids: Sequence[int], salt: str) -> RequestRecord:
        """Return a request with a number that no other has."""
        if request_id < self.num_requests:
            raise NotApplicable
        self.num_requests = request_id + 1
        return RequestRecord(request_id=request_id, token_ids=list(token_ids), salt=salt)

    def _salted(self, salt: str) -> dict[str, object]:
        return {"salt": salt} if salt else {}

    def begin_request(self, request: RequestRecord, *, looks_up: bool, computes: bool) -> bool:
        """Allocate a request's blocks and perhaps compute all its tokens; tell whether there was room."""
        token_ids, salted = request.token_ids, self._salted(request.salt)
        found = self.look_up(token_ids, request.salt) if looks_up and self.offers["lookup"] else None
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
        self._check_hit(request, num_cached, found)
        request.num_computed = num_cached
        self.tables.live[request.request_id] = request
        self.tables.refresh()
        self.entries.note_used(request)
        self.tables.check_table(request)
        self._check_cached_content(request)
        self.hits.note_computed(request)
        self.tables.check()
        self.hits.note_allocated(request.table[num_cached // self.block_size :])
        if computes or not self.offers["computed"]:
            self.compute_up_to(request, len(request.token_ids))
        return True

    def look_up(self, token_ids: Sequence[int], salt: str) -> int:
        """Ask how much of a prompt is cached, and return it."""
        found: int = self.subject.do(Invariant.LOOKUP, "lookup", list(token_ids), **self._salted(salt))
        self.entries.note_lookup(token_ids)
        self._check_found(found, token_ids, salt)
        return found

    def _check_found(self, found: int, token_ids: Sequence[int], salt: str) -> None:
        if not 0 <= found < len(token_ids):
            raise Violation(
                Invariant.ONE_TOKEN_LEFT,
                f"{found} of {len(token_ids)} tokens count as cached, so that none is left to compute",
                f"assert 0 <= result < {len(token_ids)}",
            )
        self.num_hits += found > 0
        at_least = 0 if self.collides else self.hits.num_tokens(list(token_ids), salt)
        if found >= at_least:
            return
        broken = (
            Invariant.EXPECTED_HITS,
            f"{found} tokens of {list(token_ids)} were found; {at_least} were computed before, and nothing was "
            "evicted since",
            f"assert result >= {at_least}",
        )
        if self.offers["lookup"] and not self.pool.has_groups:
            self.note(*broken)
        elif self.first_miss is None:  # of one miss nothing follows here: see `search_block_manager`
            violation = Violation(*broken)
            self.first_miss = PropertyFinding.of(violation, self.subject.program(violation))

    def _check_hit(self, request: RequestRecord, num_cached: int, found: int | None) -> None:
        self._check_found(num_cached, request.token_ids, request.salt)
        if found is not None and found != num_cached:
            self.note(
                Invariant.LOOKUP,
                f"the look-up found {found} tokens, and the allocation right after it {num_cached}",
                f"assert result == {found}",
            )

    def _check_cached_content(self, request: RequestRecord) -> None:
        """Tell the kinds of a wrong hit apart: not computed yet, or another prefix."""
        oracle = self.tables.oracle
        oracle.extend(request.prefixes, request.token_ids, request.salt)
        position = oracle.first_wrong(request.table, request.prefixes, 0, range(request.num_computed))
        if position is not None and not self.pool.has_groups:
            block = request.table[position // self.block_size]
            others = [other for other in self.live() if other is not request and block in other.table]
            is_early = oracle.read(request.table, position) is None or any(
                other.num_computed <= position for other in others
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
        """Take a request's blocks away; `is_kept`: what they hold can be found again."""
        self.hits.note_released(request, num_kept=request.num_computed if is_kept else 0)
        self.entries.note_released(request)
        del self.tables.live[request.request_id]
        request.leave()
        self.subject.do(Invariant.REMOVAL, method, request.request_id)

    def free_blocks(self) -> tuple[int | None, list[int]]:
        """Return what is free, as a count and as a list, as far as they are offered."""
        free_list = self.ask_optional(Invariant.POOL_PARTITION, "free_list") or ()
        return self.ask_optional(Invariant.ROOM, "num_free"), sorted(free_list)

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

    def check_unchanged(self, before: tuple[int | None, list[int]]) -> None:
        """Verify that a failed allocation has left free what was."""
        (old_count, old_list), (count, free) = before, self.free_blocks()
        if old_count != count:
            raise Violation(
                Invariant.ROOM,
                f"an allocation failed and changed what is free: {old_count} blocks before, {count} after",
                f"assert {self.subject.name}.num_free() == {old_count}",
            )
        if old_list != free:
            raise Violation(
                Invariant.ROOM,
                f"an allocation failed and changed what is free: {old_list} before, {free} after",
                f"assert sorted({self.subject.name}.free_list()) == {old_list}",
            )
