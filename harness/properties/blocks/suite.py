"""The block suite: any sequence of calls of a block manager, held against a content oracle and invariants 1 to 18."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED
from harness.properties.blocks.calls import BlockManagerCalls
from harness.properties.core.actions import Impossible, action, token_lists
from harness.properties.core.adapter import Adapter
from harness.properties.core.findings import Violation
from harness.properties.core.search import not_offered, search
from harness.properties.core.subject import Subject

__all__ = ["check_block_manager", "not_checked"]

MAX_TOKENS = 14
CHOICES = st.integers(0, 7)

T = TypeVar("T")


def check_block_manager(factory: Callable[..., Any], settings: Settings) -> None:
    """Search for calls after which an invariant of a block manager does not hold.

    `factory` makes an adapter, see `BlockManagerAdapter`.

    Raises:
        PropertyError: it found some; the error holds the shortest program.
        HarnessError: the adapter lacks a method.
    """
    search(lambda: BlockManagerMachine(factory), settings)


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    subject = Subject(factory, "manager", required=REQUIRED, num_blocks=4, block_size=2)
    lines = not_offered(subject, "block manager", OPTIONAL)
    if not Adapter.of(factory).takes("hash_bits"):
        lines.append("block manager: no keyword hash_bits: hashes do not collide (10)")
    if not subject.takes("allocate", "salt"):
        lines.append("block manager: allocate has no keyword salt (10)")
    return lines


class BlockManagerMachine(BlockManagerCalls):
    """Calls a block manager as an engine would, and notes what it would have computed."""

    starts: ClassVar = {
        "num_blocks": st.integers(1, 10),
        "block_size": st.integers(1, 4),
        "hash_bits": st.sampled_from((None, None, 0, 2)),
    }

    # Requests come and grow

    @action(
        weight=2,
        token_ids=token_lists(MAX_TOKENS),
        salt=st.booleans(),
        looks=st.booleans(),
        computes=st.booleans(),
    )
    def allocate(self, token_ids: list[int], salt: bool, looks: bool, computes: bool) -> None:
        """Start a request."""
        if not token_ids:
            raise Impossible
        self.history.append(list(token_ids))
        self.begin_request(
            self.new_request(token_ids, "x" if salt and self.has_salts else ""), looks=looks, computes=computes
        )

    @action(
        weight=2,
        when=lambda self: self.history,
        choice=CHOICES,
        kept=st.integers(1, MAX_TOKENS),
        more=token_lists(3, min_size=0),
        looks=st.booleans(),
        computes=st.booleans(),
    )
    def allocate_similar(self, choice: int, kept: int, more: list[int], looks: bool, computes: bool) -> None:
        """Start a request that begins like an earlier one."""
        token_ids = _chosen(self.history, choice)[:kept] + more
        if not token_ids:
            raise Impossible
        self.history.append(list(token_ids))
        self.begin_request(self.new_request(token_ids, ""), looks=looks, computes=computes)

    @action(when=lambda self: self.preempted, choice=CHOICES, computes=st.booleans())
    def resume(self, choice: int, computes: bool) -> None:
        """Start a preempted request again."""
        request = _chosen(self.preempted, choice)
        if self.begin_request(request, looks=False, computes=computes):
            self.preempted.remove(request)

    @action(
        weight=2,
        when=lambda self: self.offers["computed"] and self.behind(),
        choice=CHOICES,
        num_tokens=st.integers(1, MAX_TOKENS),
    )
    def compute(self, choice: int, num_tokens: int) -> None:
        """Compute some of a request's remaining tokens."""
        if not num_tokens:
            raise Impossible
        request = _chosen(self.behind(), choice)
        self.compute_up_to(request, min(len(request.token_ids), request.num_computed + num_tokens))

    @action(
        weight=4, when=lambda self: self.caught_up(), choice=CHOICES, token_ids=token_lists(5), computes=st.booleans()
    )
    def append(self, choice: int, token_ids: list[int], computes: bool) -> None:
        """Give a request more tokens, one after another; `computes`: the last of them too."""
        request = _chosen(self.caught_up(), choice)
        for number, token_id in enumerate(token_ids, start=1):
            if not self.append_token(request, token_id):
                break
            if computes or number < len(token_ids) or not self.offers["computed"]:
                self.compute_up_to(request, len(request.token_ids))

    @action(weight=2, when=lambda self: self.offers["fork"] and self.caught_up(), choice=CHOICES)
    def fork(self, choice: int) -> None:
        """Continue a request twice."""
        parent = _chosen(self.caught_up(), choice)
        child = self.new_request(parent.token_ids, parent.salt)
        before = self.free_blocks()
        if not self.subject.do(12, "fork", parent.request_id, child.request_id):
            self.check_unchanged(before)
            return
        child.num_computed = parent.num_computed
        child.names = list(parent.names)
        self.findable.note(child, like=parent)
        self.tables.live[child.request_id] = child
        self.tables.refresh()
        self.findable.hand_out(set(child.table) - set(parent.table))

    # Requests go

    @action(when=lambda self: self.caught_up(), choice=CHOICES)
    def free(self, choice: int) -> None:
        """Finish a request."""
        self.release(_chosen(self.caught_up(), choice), "free", is_kept=True)

    @action(when=lambda self: self.alive(), choice=CHOICES)
    def abort(self, choice: int) -> None:
        """Drop a request, wherever it stands."""
        self.release(_chosen(self.alive(), choice), "abort" if self.offers["abort"] else "free")

    @action(when=lambda self: self.alive(), choice=CHOICES)
    def preempt(self, choice: int) -> None:
        """Take a request's blocks away until later."""
        request = _chosen(self.alive(), choice)
        self.release(request, "preempt" if self.offers["preempt"] else "free")
        self.finished.remove(request.request_id)
        request.num_computed = 0
        self.preempted.append(request)

    @action(when=lambda self: self.finished or (self.offers["return_blocks"] and self.alive()), choice=CHOICES)
    def free_wrongly(self, choice: int) -> None:
        """Free a request that is gone, a block twice in one call, or one that is free."""
        live = self.alive()
        if self.offers["return_blocks"] and live and (choice % 2 or not self.finished):
            block = _chosen(live, choice).table[0]
            free = list(self.subject.ask(1, "free_list")) if self.offers["free_list"] else []
            wrong = [free[0]] if free and choice % 4 == 1 else [block, block]
            if self.subject.error_of("return_blocks", wrong) is None:
                raise Violation(16, f"blocks {wrong} were freed without an error", 'raise AssertionError("no error")')
        elif self.finished:  # an error or nothing; that nothing changes is what the invariants see
            self.subject.error_of("free", _chosen(self.finished, choice))

    # The prefix cache

    @action(when=lambda self: self.offers["lookup"], token_ids=token_lists(MAX_TOKENS))
    def lookup(self, token_ids: list[int]) -> None:
        """Ask how much of a prompt is cached."""
        if not token_ids:
            raise Impossible
        self.look_up(token_ids, "")

    @action(when=lambda self: self.offers["evict"] or self.offers["reset"], num_blocks=st.integers(0, 3))
    def forget(self, num_blocks: int) -> None:
        """Give up some of what is cached, or, for 0, all of it."""
        if self.offers["evict"] and (num_blocks or not self.offers["reset"]):
            self.subject.do(12, "evict", num_blocks)
            self.findable.evict()
        elif self.offers["reset"]:
            self.reset_cache()

    # What must always hold

    def holds(self) -> None:
        """Verify tables, owners, free blocks, content and cache."""
        self.tables.refresh()
        self.tables.check()
        if self.offers["cached_blocks"]:
            self.cached.check(may_forget_owned=self.is_reset)
        self.is_reset = False

    def drains(self) -> None:
        """Let all requests go; then one of them can have the whole pool."""
        for request in self.alive():
            self.release(request, "free")
            self.holds()
        if self.offers["reset"]:
            self.reset_cache()
            self.holds()
        whole = [2] * (self.num_blocks * self.block_size)
        if self.subject.do(6, "allocate", self.num_requests, whole) is None:
            raise Violation(
                6,
                f"after all requests are gone, one of {self.num_blocks} blocks finds no room in as many",
                "assert result is not None",
            )


def _chosen(items: Sequence[T], choice: int) -> T:
    """Return one of some items, the latest for 0."""
    if not items:
        raise Impossible
    return items[-1 - choice % len(items)]
