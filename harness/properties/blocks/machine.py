"""The actions of the block suite: requests come, grow and go in any order."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from hypothesis import strategies as st

from harness.properties.blocks.calls import BlockManagerCalls
from harness.properties.blocks.swapping import Swapping
from harness.properties.blocks.tables import RequestRecord
from harness.properties.blocks.tokens import prompts, similar_prompts, stretch_of, token_lists
from harness.properties.core.findings import Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.machine import Arguments, Drawn, NotApplicable, action, one_of

__all__ = ["BlockManagerMachine"]

MAX_TOKENS = 14
MAX_HOST_BLOCKS = 6
NEW = Drawn(None, lambda machine, _: machine.num_requests)
"""The next request's number."""
PROMPTS = prompts(MAX_TOKENS)
SIMILAR_PROMPTS = similar_prompts(MAX_TOKENS)
CHUNKS = Drawn(st.integers(1, MAX_TOKENS), lambda machine, number: number * stretch_of(machine.block_size))


class BlockManagerMachine(Swapping, BlockManagerCalls):
    """Calls a block manager as an engine would, and keeps what it would have computed."""

    lengthened: ClassVar = {"allocate": "token_ids"}

    def served_sizes(self) -> Mapping[str, Sequence[int]]:
        """Return the sizes that the adapter declares."""
        return {"num_blocks": self.pool.pool_sizes, "block_size": self.pool.block_sizes}

    def start_arguments(self) -> Arguments:
        """Return the sizes that the adapter declares, and collisions of hashes."""
        return {
            "num_blocks": st.sampled_from(self.pool.pool_sizes),
            "block_size": st.sampled_from(self.pool.block_sizes),
            "hash_bits": st.sampled_from((None, None, 0, 2)),
            "num_host_blocks": st.integers(0, MAX_HOST_BLOCKS),
        }

    # Requests come and grow

    @action(
        weight=2,
        request_id=NEW,
        token_ids=PROMPTS,
        salt=st.booleans(),
        looks_up=st.booleans(),
        computes=st.booleans(),
    )
    def allocate(self, request_id: int, token_ids: list[int], salt: bool, looks_up: bool, computes: bool) -> None:
        """Start a request."""
        if not token_ids:
            raise NotApplicable
        request = self.new_request(request_id, token_ids, "x" if salt and self.has_salts else "")
        self.history.append(list(token_ids))
        self.begin_request(request, looks_up=looks_up, computes=computes or not self.pool.chunks_prompts)

    @action(
        weight=2,
        request_id=NEW,
        token_ids=SIMILAR_PROMPTS,
        looks_up=st.booleans(),
        computes=st.booleans(),
    )
    def allocate_similar(self, request_id: int, token_ids: list[int], looks_up: bool, computes: bool) -> None:
        """Start a request that begins like an earlier one."""
        self.allocate(request_id, token_ids, False, looks_up, computes)

    @action(
        request_id=one_of(lambda self: list(self.preempted.values())),
        computes=st.booleans(),
    )
    def resume(self, request_id: int, computes: bool) -> None:
        """Start a preempted request again."""
        request = _known(self.preempted, request_id)
        if self.begin_request(request, looks_up=False, computes=computes or not self.pool.chunks_prompts):
            del self.preempted[request_id]

    @action(
        weight=2,
        when=lambda self: self.offers["computed"],
        request_id=one_of(lambda self: self.behind()),
        num_tokens=CHUNKS,
    )
    def compute(self, request_id: int, num_tokens: int) -> None:
        """Compute some of a request's remaining tokens."""
        request = _known(self.tables.live, request_id)
        if not num_tokens or request not in self.behind():
            raise NotApplicable
        self.compute_up_to(request, min(len(request.token_ids), request.num_computed + num_tokens))

    @action(
        weight=4,
        request_id=one_of(lambda self: self.caught_up()),
        token_ids=token_lists(5),
        computes=st.booleans(),
    )
    def append(self, request_id: int, token_ids: list[int], computes: bool) -> None:
        """Give a request more tokens, one after another; `computes`: the last of them too."""
        request = self._caught_up(request_id)
        if not token_ids:
            raise NotApplicable
        for number, token_id in enumerate(token_ids, start=1):
            if not self.append_token(request, token_id):
                break
            if computes or number < len(token_ids) or not (self.offers["computed"] and self.pool.chunks_prompts):
                self.compute_up_to(request, len(request.token_ids))

    @action(
        weight=2,
        when=lambda self: self.offers["fork"],
        request_id=one_of(lambda self: self.caught_up()),
        child_id=NEW,
    )
    def fork(self, request_id: int, child_id: int) -> None:
        """Continue a request twice."""
        parent = self._caught_up(request_id)
        child = self.new_request(child_id, parent.token_ids, parent.salt)
        before = self.free_blocks()
        if not self.subject.do(Invariant.ROOM, "fork", parent.request_id, child.request_id):
            self.check_unchanged(before)
            return
        child.num_computed = parent.num_computed
        child.prefixes = list(parent.prefixes)
        self.hits.note_computed(child, like=parent)
        self.tables.live[child.request_id] = child
        self.tables.refresh()
        self.hits.note_allocated(set(child.table) - set(parent.table))

    # Requests go

    @action(request_id=one_of(lambda self: self.caught_up()))
    def free(self, request_id: int) -> None:
        """Finish a request."""
        request = self._caught_up(request_id)
        self.release(request, "free", is_kept=True)
        self.finished.append(request)

    @action(request_id=one_of(lambda self: self.live()))
    def abort(self, request_id: int) -> None:
        """Drop a request, wherever it stands."""
        request = _known(self.tables.live, request_id)
        self.release(request, "abort" if self.offers["abort"] else "free")
        self.finished.append(request)

    @action(request_id=one_of(lambda self: self.live()))
    def preempt(self, request_id: int) -> None:
        """Take a request's blocks away until later."""
        request = _known(self.tables.live, request_id)
        self.release(request, "preempt" if self.offers["preempt"] else "free")
        request.num_computed = 0
        self.preempted[request_id] = request

    @action(request_id=one_of(lambda self: self.finished))
    def free_again(self, request_id: int) -> None:
        """Free a request that is gone: an error or nothing; the invariants see that nothing changes."""
        if request_id not in [request.request_id for request in self.finished]:
            raise NotApplicable
        self.subject.error_of("free", request_id)

    @action(
        when=lambda self: self.offers["return_blocks"],
        request_id=one_of(lambda self: self.live()),
        is_free=st.booleans(),
    )
    def return_wrongly(self, request_id: int, is_free: bool) -> None:
        """Return a block twice in one call, or one that is free."""
        block = _known(self.tables.live, request_id).table[0]
        free = list(self.ask_optional(Invariant.POOL_PARTITION, "free_list") or ())
        wrong = [free[0]] if free and is_free else [block, block]
        if self.subject.error_of("return_blocks", wrong) is None:
            raise Violation(
                Invariant.FREE_AND_COPY,
                f"blocks {wrong} were freed without an error",
                'raise AssertionError("no error")',
            )

    # The prefix cache

    @action(when=lambda self: self.offers["lookup"], token_ids=PROMPTS)
    def lookup(self, token_ids: list[int]) -> None:
        """Ask how much of a prompt is cached."""
        if not token_ids:
            raise NotApplicable
        self.look_up(token_ids, "")

    @action(when=lambda self: self.offers["lookup"], token_ids=SIMILAR_PROMPTS)
    def lookup_similar(self, token_ids: list[int]) -> None:
        """Ask how much of a prompt that begins like an earlier one is cached."""
        self.lookup(token_ids)

    @action(when=lambda self: self.offers["evict"], num_blocks=st.integers(1, 3))
    def evict(self, num_blocks: int) -> None:
        """Give up some of what is cached."""
        self.subject.do(Invariant.ROOM, "evict", num_blocks)
        self.hits.note_eviction()

    @action(when=lambda self: self.offers["reset"])
    def reset(self) -> None:
        """Give up all that is cached."""
        self.subject.do(Invariant.ALL_FREED, "reset")
        self.hits.note_reset()
        self.is_reset = True

    # What must always hold

    def check(self) -> None:
        """Verify tables, owners, free blocks, content and cache."""
        self.tables.refresh()
        self.tables.check()
        self.check_host_blocks()
        if self.offers["cached_blocks"]:
            self.entries.check(may_forget_owned=self.is_reset)
        self.is_reset = False

    def drain(self) -> None:
        """Let all requests go; then one of them can have the whole pool."""
        self.drain_swapped()
        for request in self.live():
            self.release(request, "free")
            self.check()
        if self.offers["reset"]:
            self.reset()
            self.check()
        num_blocks = self.num_blocks // self.pool.num_groups
        whole = [2] * (num_blocks * self.block_size)
        if whole and self.subject.do(Invariant.ALL_FREED, "allocate", self.num_requests, whole) is None:
            raise Violation(
                Invariant.ALL_FREED,
                f"after all requests are gone, one of {num_blocks} blocks finds no room in {self.num_blocks}",
                "assert result is not None",
            )

    def _caught_up(self, request_id: int) -> RequestRecord:
        request = _known(self.tables.live, request_id)
        if request not in self.caught_up():
            raise NotApplicable
        return request


def _known(requests: dict[int, RequestRecord], request_id: int) -> RequestRecord:
    if request_id not in requests:
        raise NotApplicable
    return requests[request_id]
