"""Requests on a cache of blocks or of states: they come, are computed and go, in any order.

Prompts suit small blocks and large ones: lengths around the boundaries of blocks, beginnings in common.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st

from harness.properties.blocks.tables import RequestRecord
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.machine import CHOICES, Drawn, Machine, NotApplicable, action, chosen, one_of
from harness.properties.core.search import Hits
from harness.properties.core.subject import Subject

WIDE = 1 << 16
"""A token that is 0 where ids are cut to 16 bits."""
SMALL_BLOCK = 4
"""Lists are drawn as for blocks of at most this size, and stretched for larger ones."""


def token_lists(max_size: int, *, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Return lists of zeros and ones, or of zeros and `WIDE`, by two draws; `st.lists` takes two for each element."""

    def spell(size_and_bits: tuple[int, int]) -> list[int]:
        size, bits = size_and_bits
        one = WIDE if bits >> max_size else 1
        return [one * (bits >> index & 1) for index in range(size)]

    return st.tuples(st.integers(min_size, max_size), st.integers(0, 2 ** (max_size + 1) - 1)).map(spell)


def stretch_of(block_size: int) -> int:
    """Return how often each token of a drawn list is repeated, so that it fills blocks of this size."""
    return -(-block_size // SMALL_BLOCK)


def prompts(max_size: int) -> Drawn:
    """Draw lists of up to `max_size` tokens; for large blocks as many times longer, and cut at or before a boundary."""

    def resolve(machine: Any, drawn: tuple[list[int], int]) -> list[int]:
        tokens, cut = drawn
        stretch = stretch_of(machine.block_size)
        stretched = [token for token in tokens for _ in range(stretch)]
        return stretched[: len(stretched) - (0, 1, stretch - 1)[cut] % stretch]

    return Drawn(st.tuples(token_lists(max_size), st.integers(0, 2)), resolve)


def similar_prompts(max_size: int, of: str = "history") -> Drawn:
    """Draw lists that begin as one of a machine's lists `of` that name does, and go on by up to three tokens."""

    def resolve(machine: Any, drawn: tuple[int, int, list[int]]) -> list[int]:
        choice, kept, more = drawn
        earlier: Sequence[list[int]] = getattr(machine, of)
        return [*chosen(earlier, choice)[: kept * stretch_of(machine.block_size)], *more]

    drawn = st.tuples(CHOICES, st.integers(1, max_size), token_lists(3, min_size=0))
    return Drawn(drawn, resolve, lambda machine: getattr(machine, of))


Record = TypeVar("Record", bound=RequestRecord)
MAX_TOKENS = 14
NEW = Drawn(None, lambda machine, _: machine.num_requests)
"""The next request's number."""
PROMPTS = prompts(MAX_TOKENS)
SIMILAR_PROMPTS = similar_prompts(MAX_TOKENS)
MOSTLY = st.sampled_from((True, True, True, False))
SELDOM = st.sampled_from((False, False, False, True))
LENGTHS = Drawn(
    st.tuples(st.integers(1, MAX_TOKENS), st.sampled_from((0, 0, -1, 1))),
    lambda machine, drawn: max(1, drawn[0] * stretch_of(machine.block_size) + drawn[1]),
)
"""Numbers of tokens; with large blocks mostly those at their boundaries, and next to them."""


class CacheRequests(Machine):
    """Calls a cache as an engine would, which `begin_request` and the methods after it translate."""

    lengthened: ClassVar = {"allocate": "token_ids"}

    def __init__(self, factory: Any, hits: Hits | None = None) -> None:
        super().__init__()
        self.adapter = NamedAdapter.of(factory)
        self.all_hits = hits or Hits()
        self.history: list[list[int]] = []
        self.preempted: dict[int, RequestRecord] = {}
        self.finished: list[RequestRecord] = []
        self.num_requests = 0

    def make(
        self, name: str, required: Iterable[str], optional: Iterable[str], options: dict[str, int | None], **sizes: int
    ) -> None:
        """Make the code under test, with those `options` that it takes."""
        taken = {key: value for key, value in options.items() if value is not None and self.adapter.takes(key)}
        self.subject = Subject(self.adapter, name, required=required, **sizes, **taken)
        self.offers = {method: self.subject.offers(method) for method in optional}
        self.has_salts, self.collides = self.subject.takes("allocate", "salt"), "hash_bits" in taken
        self.block_size = sizes["block_size"]

    # Requests come and are computed

    @action(weight=2, request_id=NEW, token_ids=PROMPTS, salt=st.booleans(), looks_up=st.booleans(), computes=MOSTLY)
    def allocate(self, request_id: int, token_ids: list[int], salt: bool, looks_up: bool, computes: bool) -> None:
        """Start a request."""
        request = self.new_request(request_id, token_ids, self.salt_if(salt, request_id))
        self.history.append(list(token_ids))
        self.begin_request(request, looks_up=looks_up, computes=computes)

    @action(weight=3, request_id=NEW, token_ids=SIMILAR_PROMPTS, salt=SELDOM, looks_up=st.booleans(), computes=MOSTLY)
    def allocate_similar(
        self, request_id: int, token_ids: list[int], salt: bool, looks_up: bool, computes: bool
    ) -> None:
        """Start a request that begins like an earlier one."""
        self.allocate(request_id, token_ids, salt, looks_up, computes)

    @action(request_id=one_of(lambda self: list(self.preempted.values())), computes=MOSTLY)
    def resume(self, request_id: int, computes: bool) -> None:
        """Start a preempted request again."""
        request = known(self.preempted.values(), request_id)
        if self.begin_request(request, looks_up=False, computes=computes):
            del self.preempted[request_id]

    @action(weight=2, request_id=one_of(lambda self: self.behind()), num_tokens=LENGTHS)
    def compute(self, request_id: int, num_tokens: int) -> None:
        """Compute some of a request's remaining tokens."""
        request = known(self.behind(), request_id)
        if not num_tokens:
            raise NotApplicable
        self.compute_up_to(request, min(len(request.token_ids), request.num_computed + num_tokens))

    # Requests go

    @action(weight=2, request_id=one_of(lambda self: self.caught_up()))
    def free(self, request_id: int) -> None:
        """Finish a request."""
        request = known(self.caught_up(), request_id)
        self.release(request, "free", is_kept=True)
        self.finished.append(request)

    @action(request_id=one_of(lambda self: self.live()))
    def abort(self, request_id: int) -> None:
        """Abort a request in any state."""
        request = known(self.live(), request_id)
        self.release(request, "abort" if self.offers["abort"] else "free")
        self.finished.append(request)

    @action(request_id=one_of(lambda self: self.live()))
    def preempt(self, request_id: int) -> None:
        """Preempt a request: release its memory until later."""
        request = known(self.live(), request_id)
        self.release(request, "preempt" if self.offers["preempt"] else "free")
        request.num_computed = 0
        self.preempted[request_id] = request

    @action(request_id=one_of(lambda self: self.finished))
    def free_again(self, request_id: int) -> None:
        """Free a finished request: it raises or does nothing; the invariants verify that nothing changes."""
        self.subject.error_of("free", known(self.finished, request_id).request_id)

    # What is cached

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

    # How the cache is called

    @property
    def reports_hits(self) -> bool:
        """Whether the code under test says that it has a cache; if not, it may be right to find nothing."""
        raise NotImplementedError

    def live(self) -> list[RequestRecord]:
        """Return the requests that hold memory."""
        raise NotImplementedError

    def begin_request(self, request: RequestRecord, *, looks_up: bool, computes: bool) -> bool:
        """Start a request and perhaps compute all its tokens; tell whether there was room."""
        raise NotImplementedError

    def look_up(self, token_ids: Sequence[int], salt: str) -> int:
        """Ask how much of a prompt is cached, and return it."""
        raise NotImplementedError

    def compute_up_to(self, request: RequestRecord, stop: int) -> object:
        """Compute tokens of a request."""
        raise NotImplementedError

    def release(self, request: RequestRecord, method: str, *, is_kept: bool = False) -> None:
        """Release a request's memory; `is_kept`: the computed tokens can be found again."""
        raise NotImplementedError

    # What all of them share

    def caught_up(self) -> list[RequestRecord]:
        """Return the live requests whose tokens are all computed."""
        return [request for request in self.live() if request.num_computed == len(request.token_ids)]

    def behind(self) -> list[RequestRecord]:
        """Return those with tokens to compute."""
        return [request for request in self.live() if request.num_computed < len(request.token_ids)]

    def new_request(self, request_id: int, token_ids: Sequence[int], salt: str) -> RequestRecord:
        """Return a request with a number that no other has."""
        if request_id < self.num_requests or not token_ids:
            raise NotApplicable
        self.num_requests = request_id + 1
        return RequestRecord(request_id=request_id, token_ids=list(token_ids), salt=salt)

    def salt_if(self, has_salt: bool, request_id: int) -> str:
        """Return the salt of a request; empty if it has none."""
        return salt_of(request_id) if has_salt and self.has_salts else ""

    def salted(self, salt: str) -> dict[str, object]:
        """Return the keywords of a call."""
        return {"salt": salt} if salt else {}

    def free_blocks(self) -> tuple[int | None, list[int]]:
        """Return what is free, as a count and as a list, as far as they are offered."""
        free_list = self.ask_optional(Invariant.POOL_PARTITION, "free_list") or ()
        return self.ask_optional(Invariant.ROOM, "num_free"), sorted(free_list)

    def check_unchanged(self, before: tuple[int | None, list[int]]) -> None:
        """Verify that a failed allocation has left free what was."""
        sources = (f"{self.subject.name}.num_free()", f"sorted({self.subject.name}.free_list())")
        for source, old, new in zip(sources, before, self.free_blocks(), strict=True):
            if old != new:
                what = f"an allocation failed and changed what is free: {old} before, {new} after"
                raise Violation(Invariant.ROOM, what, f"assert {source} == {old}")

    def check_found(
        self, num_cached: int, token_ids: Sequence[int], expected: tuple[int, bool], answer: str = "result"
    ) -> None:
        """Verify how much was found; `expected`: at least so much, and whether a miss is a finding by itself."""
        at_least, is_noted = expected
        if not 0 <= num_cached < len(token_ids):
            what = f"{num_cached} of {len(token_ids)} tokens count as cached, so that none is left to compute"
            raise Violation(Invariant.ONE_TOKEN_LEFT, what, f"assert 0 <= {answer} < {len(token_ids)}")
        self.all_hits.num_hits += num_cached > 0
        if num_cached >= at_least:
            return
        broken = (
            Invariant.EXPECTED_HITS,
            f"{num_cached} tokens of {list(token_ids)} were found; {at_least} were computed before, and nothing was "
            "evicted since",
            f"assert result >= {at_least}",
        )
        if is_noted:
            self.note(*broken)
        else:  # one miss proves nothing: see `search_cache`
            self.all_hits.note_miss(Violation(*broken), self.subject, is_finding=self.reports_hits)

    def check_same(self, looked_up: int | None, num_cached: int) -> None:
        """Verify that a look-up, if there was one, said what the allocation right after it found."""
        if looked_up is not None and looked_up != num_cached:
            what = f"the look-up found {looked_up} tokens, and the allocation right after it {num_cached}"
            self.note(Invariant.LOOKUP, what, f"assert result == {looked_up}")


def salt_of(request_id: int) -> str:
    """Return one of two salts that begin alike."""
    return f"tenant {request_id % 2}"


def known(requests: Iterable[Record], request_id: int) -> Record:
    """Return the request of a number.

    Raises:
        NotApplicable: there is none.
    """
    request = next((entry for entry in requests if entry.request_id == request_id), None)
    if request is None:
        raise NotApplicable
    return request
