"""The calls of an engine to a state cache; each answer is held against the state of every prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.properties.blocks.content import ContentOracle
from harness.properties.blocks.requests import CacheRequests
from harness.properties.blocks.tables import RequestRecord
from harness.properties.core.findings import Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.search import Hits
from harness.properties.states.adapter import OPTIONAL, REQUIRED, StateCapabilities
from harness.properties.states.snapshots import Snapshots


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
    """A state cache, and what is known of its requests, slots and snapshots."""

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
        found = self.look_up(token_ids, salt) if looks_up and self.offers["lookup"] else None
        expected = self.snapshots.expected(request.prefixes)
        arguments = (request.request_id, list(token_ids))
        num_cached = self.subject.do(Invariant.ROOM, "allocate", *arguments, **self.salted(salt))
        if num_cached is None:
            self.check_no_room(before, num_more=1)
            return False
        self.check_found(num_cached, token_ids, expected)
        self.check_same(found, num_cached)
        self.enter(request, num_cached, Invariant.RESTORED_STATE)
        if computes:
            self.compute_up_to(request, len(token_ids))
        return True

    def look_up(self, token_ids: Sequence[int], salt: str) -> int:
        """Ask how much of a prompt is in a snapshot, and return it."""
        prefixes: list[int] = []
        self.oracle.extend(prefixes, token_ids, salt)
        expected = self.snapshots.expected(prefixes)
        found: int = self.subject.do(Invariant.LOOKUP, "lookup", list(token_ids), **self.salted(salt))
        self.check_found(found, token_ids, expected)
        return found

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
