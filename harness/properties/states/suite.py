"""The state suite: any sequence of calls of a state cache, checked against the state of every prefix.

Beside the actions of the block suite there are drafts, ways back, forks, resets and transfers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the function here takes
from hypothesis import strategies as st

from harness.properties.blocks.requests import LENGTHS, MAX_TOKENS, NEW, SELDOM, known, similar_prompts, token_lists
from harness.properties.blocks.tables import RequestRecord
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.machine import CHOICES, Arguments, Drawn, NotApplicable, action, chosen, one_of
from harness.properties.core.search import SearchReport, not_offered, search_cache
from harness.properties.core.subject import Subject
from harness.properties.states.adapter import OPTIONAL, REQUIRED, StateCapabilities
from harness.properties.states.calls import StateCacheCalls, Transfer

MAX_HOST_SLOTS = 4
CONNECTOR = ("offload", "load", "complete", "fail", "poll")
ONE_LONGER = Drawn(
    CHOICES, lambda machine, choice: [*chosen(machine.history, choice), 0], lambda machine: machine.history
)
OFFLOADED = similar_prompts(MAX_TOKENS, of="offloaded")


def has_connector(machine: "StateCacheMachine") -> bool:
    """Whether states can be moved."""
    return all(machine.offers[method] for method in CONNECTOR)


def is_seldom(machine: "StateCacheMachine") -> bool:
    """Whether enough was done since the last time that snapshots were dropped, so that there is something to find."""
    return machine.num_requests % 8 == 7


class StateCacheMachine(StateCacheCalls):
    """Calls a state cache as an engine would, and knows the state of every prefix."""

    def served_sizes(self) -> Mapping[str, Sequence[int]]:
        """Return the sizes that the adapter declares."""
        return {"num_slots": self.declared.pool_sizes, "block_size": self.declared.block_sizes}

    def start_arguments(self) -> Arguments:
        """Return the sizes that the adapter declares, and collisions of hashes."""
        return {
            "num_slots": st.sampled_from(self.declared.pool_sizes),
            "block_size": st.sampled_from(self.declared.block_sizes),
            "hash_bits": st.sampled_from((None, None, 0, 2)),
            "num_host_slots": st.integers(1, MAX_HOST_SLOTS),
        }

    @action(weight=2, request_id=one_of(lambda self: self.caught_up()), token_ids=token_lists(5))
    def append(self, request_id: int, token_ids: list[int]) -> None:
        """Give a request more tokens, and compute them one after another."""
        request = known(self.caught_up(), request_id)
        if not token_ids:
            raise NotApplicable
        for token_id in token_ids:
            self.lengthen(request, [token_id])
            if not self.compute_up_to(request, len(request.token_ids)):
                self.shorten(request, request.num_computed)
                break

    @action(
        weight=2,
        when=lambda self: self.offers["draft"] and self.offers["accept"],
        request_id=one_of(lambda self: self.caught_up()),
        token_ids=token_lists(8),
    )
    def draft(self, request_id: int, token_ids: list[int]) -> None:
        """Compute a token of a request, and drafts after it."""
        request, token_ids = known(self.caught_up(), request_id), token_ids[: 1 + self.declared.max_draft_tokens]
        if not token_ids:
            raise NotApplicable
        prefixes = list(request.prefixes)
        self.oracle.extend(prefixes, [*request.token_ids, *token_ids], request.salt)
        if self.write("draft", request, token_ids, prefixes[request.num_computed :]):
            self.drafts[request_id] = token_ids

    @action(
        weight=3,
        request_id=one_of(lambda self: [self.requests[request_id] for request_id in self.drafts]),
        num_rejected=st.integers(0, 4),
    )
    def accept(self, request_id: int, num_rejected: int) -> None:
        """Keep the first tokens of a request's drafts, and reject the others."""
        if request_id not in self.drafts:
            raise NotApplicable
        request, token_ids = self.requests[request_id], self.drafts.pop(request_id)
        num_tokens = max(1, len(token_ids) - num_rejected)
        start = request.num_computed
        self.lengthen(request, token_ids[:num_tokens])
        request.num_computed = len(request.token_ids)
        self.snapshots.note_written(request, start)
        self.subject.do(Invariant.REWOUND_STATE, "accept", request_id, num_tokens)
        self.check_state(request, Invariant.REWOUND_STATE)

    @action(when=lambda self: self.offers["rewind"], request_id=one_of(lambda self: self.settled()), num_tokens=LENGTHS)
    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Take the last tokens of a request back."""
        request = known(self.settled(), request_id)
        num_tokens = min(num_tokens, request.num_computed - 1)
        if num_tokens < 1:
            raise NotApplicable
        kept = self.subject.do(Invariant.REWOUND_STATE, "rewind", request_id, num_tokens)
        if not 0 <= kept <= num_tokens:
            what = f"request {request_id} goes back to {num_tokens} tokens, and {kept} are said to be in its state"
            raise Violation(Invariant.REWOUND_STATE, what, f"assert 0 <= result <= {num_tokens}")
        self.shorten(request, num_tokens)
        request.num_computed = kept
        self.check_state(request, Invariant.REWOUND_STATE)

    @action(
        weight=2, when=lambda self: self.offers["fork"], request_id=one_of(lambda self: self.settled()), child_id=NEW
    )
    def fork(self, request_id: int, child_id: int) -> None:
        """Continue a request twice."""
        parent = known(self.settled(), request_id)
        child = self.new_request(child_id, parent.token_ids, parent.salt)
        before = self.free_blocks()
        if self.subject.do(Invariant.ROOM, "fork", request_id, child_id):
            self.enter(child, parent.num_computed, Invariant.HELD_STATE)
        else:
            self.check_no_room(before, num_more=1)

    @action(when=lambda self: self.offers["evict"] and is_seldom(self), num_slots=st.integers(1, 3))
    def evict(self, num_slots: int) -> None:
        """Give up some snapshots."""
        self.snapshots.note_eviction(num_slots)
        self.subject.do(Invariant.ROOM, "evict", num_slots)

    @action(when=lambda self: self.offers["reset"] and is_seldom(self) and not self.transfers)
    def reset(self) -> None:
        """Give up all snapshots."""
        if self.transfers:
            raise NotApplicable
        self.snapshots.note_reset()
        self.subject.do(Invariant.ALL_FREED, "reset")

    # A connector moves states to the host and back; the suite decides when a transfer ends, and how

    @action(weight=2, when=has_connector, request_id=NEW, token_ids=ONE_LONGER, salt=SELDOM)
    def offload(self, request_id: int, token_ids: list[int], salt: bool) -> None:
        """Begin to copy a snapshot to the host."""
        self._begin("offload", self.new_request(request_id, token_ids, self.salt_if(salt, request_id)))

    @action(weight=4, when=has_connector, request_id=NEW, token_ids=OFFLOADED, salt=SELDOM)
    def load(self, request_id: int, token_ids: list[int], salt: bool) -> None:
        """Start a request by a state on the host."""
        self._begin("load", self.new_request(request_id, token_ids, self.salt_if(salt, request_id)))

    @action(weight=3, request_id=one_of(lambda self: self.moving()), fails=SELDOM)
    def end_transfer(self, request_id: int, fails: bool) -> None:
        """Let the transport end a transfer."""
        transfer = known(self.moving(), request_id)
        transfer.has_ended = True
        self.snapshots.note_given_up(transfer, len(transfer.token_ids))
        self.subject.do(Invariant.TRANSFER, "fail" if fails else "complete", transfer.number)

    @action(weight=2, when=lambda self: self.transfers)
    def poll(self) -> None:
        """Ask which transfers have ended since the last time; requests that waited for them go on."""
        if not self.transfers:
            raise NotApplicable
        reported = dict(self.subject.do(Invariant.TRANSFER, "poll"))
        ended = {transfer.number: transfer for transfer in self.transfers.values() if transfer.has_ended}
        awaited = {number for number, transfer in ended.items() if transfer.is_awaited}
        if not awaited <= reported.keys() <= ended.keys():
            what = f"transfers {sorted(reported)} are reported, and {sorted(ended)} have ended since the last time"
            raise Violation(
                Invariant.TRANSFER, what, f"assert {awaited or 'set()'} <= set(result) <= {set(ended) or 'set()'}"
            )
        for number, transfer in ended.items():
            del self.transfers[transfer.request_id]
            self.snapshots.note_given_up(transfer, len(transfer.token_ids))
            if transfer.is_load and transfer.is_awaited:
                num_loaded, answer = reported[number], f"result[{number}]"
                self.check_found(num_loaded, transfer.token_ids, (0, True), answer)
                self.enter(transfer, num_loaded, Invariant.TRANSFER, answer)

    @action(weight=2, request_id=one_of(lambda self: self.loading()))
    def abort_load(self, request_id: int) -> None:
        """End a request that waits for its state; the transport may still write there."""
        known(self.loading(), request_id).is_awaited = False
        self.subject.do(Invariant.REMOVAL, "free", request_id)

    # What must always hold

    def check(self) -> None:
        """Verify states, slots and snapshots."""
        for request in self.settled():
            self.check_state(request, Invariant.HELD_STATE)
        self.check_slots()
        self.check_host_slots()
        self.snapshots.check()

    def drain(self) -> None:
        """Let all requests go; then there is room for as many as the cache can have."""
        self.drain_transfers()
        for request in self.live():
            self.release(request, "free")
            self.check()
        if self.offers["reset"]:
            self.reset()
            self.check()
            for token_ids in [*self.history[-2:], *self.offloaded[-2:]]:
                self._check_forgotten(token_ids)
        for number in range(self.num_slots // self.declared.slots_per_request):
            request = self.new_request(self.num_requests, [2], "")
            if self.subject.do(Invariant.ALL_FREED, "allocate", request.request_id, [2]) is None:
                what = f"after all requests are gone, {number} new ones find room in {self.num_slots} slots"
                raise Violation(Invariant.ALL_FREED, what, "assert result is not None")
            self.enter(request, 0, Invariant.RESTORED_STATE)

    def _check_forgotten(self, token_ids: list[int]) -> None:
        """Verify that nothing is found of what was there before a reset."""
        request = self.new_request(self.num_requests, [*token_ids, 0], "")
        if self.begin_request(request, looks_up=False, computes=False):
            self.release(request, "free")
        if self.offloaded:
            self.load(self.num_requests, [*token_ids, 0], False)
            self.drain_transfers()
        for loaded in self.live():
            self.release(loaded, "free")

    def moving(self) -> list[Transfer]:
        """Return the transfers that have not ended."""
        return [transfer for transfer in self.transfers.values() if not transfer.has_ended]

    def loading(self) -> list[Transfer]:
        """Return the transfers that a request waits for."""
        return [transfer for transfer in self.transfers.values() if transfer.is_load and transfer.is_awaited]

    def check_host_slots(self) -> None:
        """Verify that all slots of the host are free when no transfer uses them."""
        num_free = self.ask_optional(Invariant.POOL_PARTITION, "num_free_host")
        if num_free is not None and not self.transfers and num_free != self.num_host_slots:
            what = f"no transfer is left, and {num_free} of {self.num_host_slots} slots of the host are free"
            ending = f"assert {self.subject.name}.num_free_host() == {self.num_host_slots}"
            raise Violation(Invariant.POOL_PARTITION, what, ending)

    def drain_transfers(self) -> None:
        """Let all transfers end, the first successfully, the second not, and so on."""
        for index, transfer in enumerate(self.moving()):
            self.end_transfer(transfer.request_id, index % 2 == 1)
            self.check()
        if self.transfers:
            self.poll()
            self.check()

    def _begin(self, method: str, request: RequestRecord) -> None:
        before, salted = self.free_blocks(), self.salted(request.salt)
        arguments = [request.request_id, list(request.token_ids)][method == "offload" :]
        number = self.subject.do(Invariant.TRANSFER, method, *arguments, **salted)
        if number is None:
            self.check_unchanged(before)
            return
        self.transfers[request.request_id] = Transfer(
            request_id=request.request_id, token_ids=request.token_ids, salt=request.salt, prefixes=request.prefixes,
            number=number, is_load=method == "load",
        )  # fmt: skip
        self.offloaded += [request.token_ids] if method == "offload" else []


def search_state_cache(
    factory: Callable[..., Any], settings: Settings, *, is_first_enough: bool = False
) -> SearchReport:
    """Search for calls after which an invariant of a state cache does not hold; return every broken one once.

    `factory` makes an adapter, see `states/adapter.py`. `is_first_enough`: end at the first example that breaks one.

    Raises:
        HarnessError: BAD_ADAPTER: the adapter lacks a method.
    """
    adapter = NamedAdapter.of(factory)
    return search_cache(
        "state cache", lambda hits: StateCacheMachine(adapter, hits), settings, is_first_enough=is_first_enough
    )


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    adapter = NamedAdapter.of(factory)
    declared = StateCapabilities.of(adapter)
    sizes = {"num_slots": max(declared.pool_sizes), "block_size": declared.block_sizes[-1]}
    subject = Subject(adapter, "cache", required=REQUIRED, **sizes)
    lines = not_offered(subject, "state cache", OPTIONAL, "allocate", 29)
    if declared.snapshots != "blocks":
        lines.append(f"state cache: it declares snapshots = {declared.snapshots!r}: which states must be found (17)")
    most, longest = sizes["num_slots"], max(declared.block_sizes)
    return [*lines, f"state cache: more than {most} slots, and blocks of more than {longest} tokens"]
