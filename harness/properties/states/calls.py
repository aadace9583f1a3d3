"""The calls of an engine to a state cache; each answer is compared with the state of every prefix.

Snapshots that the cache keeps have rules of their own: what they hold, which must be there, and which may be dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.properties.blocks.requests import CacheRequests
from harness.properties.blocks.tables import ContentOracle, RequestRecord
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.search import Hits
from harness.properties.states.adapter import OPTIONAL, REQUIRED, StateCapabilities


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer(RequestRecord):
    """A transfer that was not reported, with the tokens and the number of its request; an offload has one, too."""

    number: int
    """The adapter's own."""
    is_load: bool
    is_awaited: bool = True
    """Whether its request still waits for it."""
    has_ended: bool = False


class StateCacheCalls(CacheRequests):
    """A state cache with the suite's record of its requests, slots and snapshots."""

    def __init__(self, factory: Any, hits: Hits | None = None) -> None:
        super().__init__(factory, hits)
        self.declared = StateCapabilities.of(self.adapter)

    def start(self, num_slots: int, block_size: int, hash_bits: int | None, num_host_slots: int) -> None:
        """Make a cache."""
        options = {"hash_bits": hash_bits, "num_host_slots": num_host_slots}
        self.make("cache", REQUIRED, OPTIONAL, options, num_slots=num_slots, block_size=block_size)
        self.num_slots, self.num_host_slots = num_slots, num_host_slots
        self.oracle, self.snapshots = ContentOracle(block_size), Snapshots(self)
        self.requests: dict[int, RequestRecord] = {}
        self.drafts: dict[int, list[int]] = {}
        """By request, tokens that are computed and neither accepted nor rejected."""
        self.transfers: dict[int, Transfer] = {}
        """By request, those that were not reported: each may hold slots."""
        self.offloaded: list[list[int]] = []

    @property
    def reports_hits(self) -> bool:
        """Whether the cache says that it keeps snapshots."""
        return self.declared.snapshots != "none"

    @property
    def most_held(self) -> int:
        """The most slots that requests and transfers may hold now."""
        return self.declared.slots_per_request * (len(self.requests) + len(self.transfers))

    def live(self) -> list[RequestRecord]:
        """Return the requests that hold a state."""
        return list(self.requests.values())

    def settled(self) -> list[RequestRecord]:
        """Return those whose drafts, if there were any, are accepted or rejected."""
        return [request for request in self.live() if request.request_id not in self.drafts]

    def caught_up(self) -> list[RequestRecord]:
        """Return those of them whose tokens are all computed."""
        return [request for request in super().caught_up() if request.request_id not in self.drafts]

    def new_request(self, request_id: int, token_ids: Sequence[int], salt: str) -> RequestRecord:
        """Return a request with a number that no other has, and the numbers of its prefixes."""
        request = super().new_request(request_id, token_ids, salt)
        self.oracle.extend(request.prefixes, request.token_ids, salt)
        return request

    def begin_request(self, request: RequestRecord, *, looks_up: bool, computes: bool) -> bool:
        """Start a request and perhaps compute all its tokens; tell whether there was room."""
        token_ids, salt, before = request.token_ids, request.salt, self.free_blocks()
        looked_up = self.look_up(token_ids, salt) if looks_up and self.offers["lookup"] else None
        expected = self.snapshots.expected(request.prefixes)
        arguments = (request.request_id, list(token_ids))
        num_cached = self.subject.do(Invariant.ROOM, "allocate", *arguments, **self.salted(salt))
        if num_cached is None:
            self.check_no_room(before, num_more=1)
            return False
        self.check_found(num_cached, token_ids, expected)
        self.check_same(looked_up, num_cached)
        self.enter(request, num_cached, Invariant.RESTORED_STATE)
        if computes:
            self.compute_up_to(request, len(token_ids))
        return True

    def look_up(self, token_ids: Sequence[int], salt: str) -> int:
        """Look up how many tokens of a prompt a snapshot covers; return and check their number."""
        prefixes: list[int] = []
        self.oracle.extend(prefixes, token_ids, salt)
        expected = self.snapshots.expected(prefixes)
        num_cached: int = self.subject.do(Invariant.LOOKUP, "lookup", list(token_ids), **self.salted(salt))
        self.check_found(num_cached, token_ids, expected)
        return num_cached

    def enter(self, request: RequestRecord, num_cached: int, invariant: Invariant, answer: str = "result") -> None:
        """Take a request among the live ones, and verify the state that it begins with, as the `answer` says."""
        request.num_computed = num_cached
        self.requests[request.request_id] = request
        self.check_state(request, invariant)
        if num_cached and request.prefixes[num_cached - 1] not in self.snapshots.written:
            what = f"the state of {request.token_ids[:num_cached]} was found, and not written since the last reset"
            raise Violation(invariant, what, f"assert {answer} != {num_cached}")

    def compute_up_to(self, request: RequestRecord, stop: int) -> bool:
        """Compute tokens in one call; tell whether there was room."""
        start = request.num_computed
        if not self.write("write", request, request.token_ids[start:stop], request.prefixes[start:stop]):
            return False
        request.num_computed = stop
        self.snapshots.note_written(request, start)
        return True

    def write(self, method: str, request: RequestRecord, token_ids: list[int], prefixes: list[int]) -> bool:
        """Write the states of some tokens; tell whether there was room."""
        before, states = self.free_blocks(), [prefix + 1 for prefix in prefixes]
        self.snapshots.offered.update(states)
        if self.subject.do(Invariant.ROOM, method, request.request_id, token_ids, states) is False:
            self.check_no_room(before, num_more=0)
            return False
        return True

    def lengthen(self, request: RequestRecord, token_ids: Sequence[int]) -> None:
        """Give a request more tokens."""
        request.token_ids += token_ids
        self.oracle.extend(request.prefixes, request.token_ids, request.salt)

    def shorten(self, request: RequestRecord, num_tokens: int) -> None:
        """Take the last tokens of a request away."""
        self.snapshots.note_given_up(request, num_tokens)
        del request.token_ids[num_tokens:], request.prefixes[num_tokens:]

    def release(self, request: RequestRecord, method: str, *, is_kept: bool = False) -> None:
        """End a request; `is_kept`: what it has computed can be found again."""
        self.history.append(list(request.token_ids))
        if not is_kept:
            self.snapshots.note_given_up(request, 0)
        del self.requests[request.request_id]
        self.drafts.pop(request.request_id, None)
        self.subject.do(Invariant.REMOVAL, method, request.request_id)

    def check_no_room(self, before: tuple[int | None, list[int]], *, num_more: int) -> None:
        """Verify that there was no room, for `num_more` requests beside the live ones, and that nothing changed."""
        most_held = self.most_held + num_more * self.declared.slots_per_request
        if most_held <= self.num_slots:
            what = f"at most {most_held} of {self.num_slots} slots would be held, and there was no room"
            raise Violation(Invariant.ROOM, what, "assert result not in (None, False)")
        self.check_unchanged(before)

    def check_state(self, request: RequestRecord, invariant: Invariant) -> None:
        """Verify that the state of a request is that of its computed tokens."""
        expected = request.prefixes[request.num_computed - 1] + 1 if request.num_computed else 0
        actual = self.subject.ask(invariant, "read", request.request_id)
        if actual != expected:
            what = (
                f"request {request.request_id} has the state of {self.snapshots.describe(actual)}; its computed tokens "
            )
            what += f"are {request.token_ids[: request.num_computed]}"
            raise Violation(invariant, what, f"assert {self.subject.name}.read({request.request_id}) == {expected}")

    def check_slots(self) -> None:
        """Verify that the slots that are free, and those that requests hold, are all slots."""
        cache, (num_free, walked) = self.subject.name, self.free_blocks()
        counted, listed = f"{cache}.num_free()", f"{cache}.free_list()"
        asked = self.requests if self.offers["slots"] else ()
        held = {slot for request in asked for slot in self.subject.ask(Invariant.POOL_PARTITION, "slots", request)}
        is_exact = self.offers["slots"] and not self.transfers
        most = self.num_slots - len(held)
        fewest = most if is_exact else self.num_slots - self.most_held
        shown = {f"len({listed})": len(walked)} if self.offers["free_list"] else {}
        shown |= {} if num_free is None else {counted: num_free}
        rules = [(fewest <= number <= most, f"{fewest} <= {source} <= {most}") for source, number in shown.items()]
        rules.append((len(set(walked)) == len(walked), f"len(set({listed})) == len({listed})"))
        rules.append((not held & set(walked), f"not {sorted(held)} or not set({sorted(held)}) & set({listed})"))
        rules.append((len(set(shown.values())) < 2, " == ".join(shown)))
        for holds, rule in rules:
            if not holds:
                what = f"{len(held)} to {self.most_held} of {self.num_slots} slots are held, and not: {rule}"
                raise Violation(Invariant.POOL_PARTITION, what, f"assert {rule}")


Entry = tuple[tuple[int, ...], int]
"""All tokens up to a snapshot, and the state that it holds."""


class Snapshots:
    """The states that were written, and those that the cache says it keeps.

    Attributes:
        written: the prefixes, by number, whose states the cache may hold.
        offered: the states that it was given, drafts among them.
    """

    def __init__(self, machine: "StateCacheCalls") -> None:
        self._machine = machine
        self.written: set[int] = set()
        self.offered: set[int] = set()
        self._num_written = 0
        """States that the present action has written, or accepted."""
        self._due: set[int] = set()
        """Prefixes of full blocks that were computed and not given up."""
        self._ever_due: set[int] = set()
        self._most_held = 0
        self._entries: set[Entry] = set()
        self._num_evicted = 0
        """Slots that the present action asks to be emptied."""
        self._may_go: set[int] = set()
        """Prefixes whose snapshots the present action may drop without need."""

    def note_written(self, request: RequestRecord, start: int) -> None:
        """Note that the tokens from `start` on are computed, and accepted."""
        size, prefixes = self._machine.block_size, request.prefixes[: request.num_computed]
        self.written.update(prefixes[start:])
        self._num_written += len(prefixes) - start
        self._due.update(prefixes[size - 1 :: size][start // size :])
        self._ever_due |= self._due

    def note_given_up(self, request: RequestRecord, num_kept: int) -> None:
        """Note that the cache may forget what a request has computed beyond `num_kept` tokens."""
        self._due.difference_update(request.prefixes[num_kept:])
        self._may_go.update(request.prefixes)

    def note_eviction(self, num_slots: int) -> None:
        """Note that snapshots in so many slots are given up."""
        self._due.clear()
        self._num_evicted += num_slots

    def note_reset(self) -> None:
        """Note that nothing may be found that was written before, but for what requests hold."""
        self.note_eviction(self._machine.num_slots)
        self.written = {prefix for entry in self._machine.live() for prefix in entry.prefixes[: entry.num_computed]}

    def expected(self, prefixes: Sequence[int]) -> tuple[int, bool]:
        """Count the tokens of a prompt that must be found, and tell whether a miss is a finding by itself.

        By the snapshots that the cache shows, or by full blocks as long as there is room for all states.
        """
        machine, size, num_due = self._machine, self._machine.block_size, 0
        lengths = {prefix + 1: length for length, prefix in enumerate(prefixes[:-1], start=1)}
        num_shown = 0 if machine.collides else max((lengths.get(state, 0) for _, state in self._shown()), default=0)
        most_held = max(self._most_held, machine.most_held) + machine.declared.slots_per_request
        if len(self._ever_due) + most_held <= machine.num_slots and not machine.collides:
            while num_due + size < len(prefixes) and prefixes[num_due + size - 1] in self._due:
                num_due += size
        is_exact = machine.declared.snapshots == "blocks"
        return max(num_shown, num_due) if is_exact else num_shown or num_due, is_exact or num_shown > 0

    def check(self) -> None:
        """Verify what each snapshot holds, and that no more are gone than had to make room."""
        machine, entries = self._machine, self._shown()
        for tokens, state in sorted(entries):
            self._check_entry(tokens, state)
        self._most_held = max(self._most_held, machine.most_held)
        num_new = max(len(entries - self._entries), self._num_written)
        num_over = max(0, len(self._entries) + num_new + machine.most_held - machine.num_slots) + self._num_evicted
        lost = sorted(entry for entry in self._entries - entries if entry[1] - 1 not in self._may_go)
        if len(lost) > num_over:
            what = f"snapshots of {[list(tokens) for tokens, _ in lost]} are gone, and {num_over} had to make room"
            machine.note(Invariant.EVICTED_ENTRY, what, f"assert {lost[0]} in {self._source()}")
        self._entries, self._num_written, self._num_evicted = entries, 0, 0
        self._may_go.clear()

    def describe(self, state: Any) -> str:
        """Spell out the tokens of a state."""
        if state not in self.offered:
            return f"nothing that was written ({state!r})" if state else "no tokens"
        return self._machine.oracle.describe((0, state - 1))

    def _check_entry(self, tokens: tuple[int, ...], state: int) -> None:
        is_own = state in self.offered and self._machine.oracle.spell(state - 1)[1] == tokens
        if not is_own or state - 1 not in self.written:
            what = f"the snapshot of {list(tokens)} holds the state of {self.describe(state)}"
            what += ", which was rejected or given up" if is_own else ""
            ending = f"assert {(tokens, state)} not in {self._source()}"
            raise Violation(Invariant.SNAPSHOT_STATE, what, ending)

    def _shown(self) -> set[Entry]:
        shown = self._machine.ask_optional(Invariant.SNAPSHOT_STATE, "cached_states") or ()
        return {(tuple(tokens), state) for tokens, state in shown}

    def _source(self) -> str:
        return f"[(tuple(tokens), state) for tokens, state in {self._machine.subject.name}.cached_states()]"
