"""The block suite: any sequence of calls of a block manager, checked against a content oracle and 18 invariants."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED, PoolCapabilities
from harness.properties.blocks.calls import Swapping
from harness.properties.blocks.requests import NEW, known, token_lists
from harness.properties.blocks.tables import RequestRecord
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.machine import Arguments, NotApplicable, action, one_of
from harness.properties.core.search import SearchReport, not_offered, search_cache
from harness.properties.core.subject import Subject

MAX_HOST_BLOCKS = 6


class BlockManagerMachine(Swapping):
    """Call a block manager as an engine would, and keep the content that it would have computed."""

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

    # Requests grow

    @action(
        weight=4,
        request_id=one_of(lambda self: self.caught_up()),
        token_ids=token_lists(5),
        computes=st.booleans(),
    )
    def append(self, request_id: int, token_ids: list[int], computes: bool) -> None:
        """Give a request more tokens, one after another; `computes`: the last of them too."""
        request = known(self.caught_up(), request_id)
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
        num_children=st.sampled_from((1, 1, 1, 3)),
    )
    def fork(self, request_id: int, child_id: int, num_children: int) -> None:
        """Continue a request twice, or more often, as the samples of one prompt do."""
        parent = known(self.caught_up(), request_id)
        for number in range(child_id, child_id + num_children):
            self._fork(parent, number)

    def _fork(self, parent: RequestRecord, child_id: int) -> None:
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

    # The pool and the prefix cache

    @action(
        when=lambda self: self.offers["return_blocks"],
        request_id=one_of(lambda self: self.live()),
        is_free=st.booleans(),
    )
    def return_wrongly(self, request_id: int, is_free: bool) -> None:
        """Return a block twice in one call, or one that is free."""
        block = known(self.live(), request_id).table[0]
        free = list(self.ask_optional(Invariant.POOL_PARTITION, "free_list") or ())
        wrong = [free[0]] if free and is_free else [block, block]
        if self.subject.error_of("return_blocks", wrong) is None:
            raise Violation(
                Invariant.FREE_AND_COPY,
                f"blocks {wrong} were freed without an error",
                'raise AssertionError("no error")',
            )

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
        """Finish all requests; then one request must fit into the whole pool."""
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


def search_block_manager(
    factory: Callable[..., Any], settings: Settings, *, is_first_enough: bool = False
) -> SearchReport:
    """Search for calls after which an invariant of a block manager does not hold; return every broken one once.

    `factory` makes an adapter, see `BlockManagerAdapter`. `is_first_enough`: end at the first example that breaks one.

    Raises:
        HarnessError: BAD_ADAPTER: the adapter lacks a method.
    """
    adapter = NamedAdapter.of(factory)
    return search_cache(
        "block manager", lambda hits: BlockManagerMachine(adapter, hits), settings, is_first_enough=is_first_enough
    )


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Return what the adapter does not offer, with the invariants that are therefore not checked, or checked less."""
    adapter = NamedAdapter.of(factory)
    pool = PoolCapabilities.of(adapter)
    subject = Subject(
        adapter, "manager", required=REQUIRED, num_blocks=max(pool.pool_sizes), block_size=pool.block_sizes[-1]
    )
    lines = not_offered(subject, "block manager", OPTIONAL, "allocate", 10)
    if pool.has_groups:
        lines.append("block manager: with several groups of layers, how much a look-up must find (17)")
    else:
        lines.append("block manager: it does not declare windows: groups of layers with a sliding window (7)")
    most, longest = max(pool.pool_sizes), max(pool.block_sizes)
    return [*lines, f"block manager: pools of more than {most} blocks, and blocks of more than {longest} tokens"]
