"""The scheduler suite: arrivals, steps, forks, aborts and finishes in any order, checked against invariants 19 to 25.

Where the scheduler shows its block tables, the invariants of the blocks are verified too.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st

from harness.properties.blocks.requests import NEW, known, prompts, salt_of, similar_prompts, token_lists
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import Invariant, Violation
from harness.properties.core.machine import Arguments, NotApplicable, action, one_of
from harness.properties.core.search import SearchReport, not_offered, search
from harness.properties.core.subject import Subject
from harness.properties.scheduler.adapter import OPTIONAL, REQUIRED, SchedulerCapabilities
from harness.properties.scheduler.calls import MAX_EMPTY_STEPS, SchedulerCalls
from harness.properties.scheduler.requests import ScheduledRequest

MAX_TOKENS = 12
PROMPTS = prompts(MAX_TOKENS)
SIMILAR_PROMPTS = similar_prompts(MAX_TOKENS)
SAMPLED = st.integers(0, 3**4 - 1).map(lambda number: [number // 3**place % 3 for place in range(4)])
"""Four tokens of 0, 1 and the end of sequence: the ternary digits of one number."""
MOST_SEQS = 4
MOSTLY = st.sampled_from((True, True, True, True, True, False))


class SchedulerMachine(SchedulerCalls):
    """Drive a scheduler as an engine would, without a model.

    With `refuses`, the machine also queues impossible requests, which the scheduler must refuse.
    """

    lengthened: ClassVar = {"add": "token_ids"}

    def __init__(self, factory: Any, *, refuses: bool = True) -> None:
        super().__init__(factory)
        self._refuses = refuses and self.declared.refuses_impossible
        self.history: list[list[int]] = []

    def served_sizes(self) -> Mapping[str, Sequence[int]]:
        """Return the sizes that the adapter declares."""
        declared = self.declared
        return {
            "num_blocks": declared.pool_sizes,
            "block_size": declared.block_sizes,
            "budget": declared.budgets,
            "max_model_len": declared.max_model_lens,
        }

    def start_arguments(self) -> Arguments:
        """Return strategies for the sizes that the adapter declares, and for the number of hash bits."""
        declared = self.declared
        return {
            "num_blocks": st.sampled_from([size for size in declared.pool_sizes if size > 1] or declared.pool_sizes),
            "block_size": st.sampled_from(declared.block_sizes),
            "budget": st.sampled_from(declared.budgets),
            "max_num_seqs": st.integers(1, MOST_SEQS),
            "max_model_len": st.sampled_from(declared.max_model_lens),
            "hash_bits": st.sampled_from((None, None, 0, 2)),
        }

    # Requests come and go

    @action(
        weight=3, request_id=NEW, token_ids=PROMPTS, max_new_tokens=st.integers(1, 5), salt=st.booleans(),
        is_possible=MOSTLY,
    )  # fmt: skip
    def add(self, request_id: int, token_ids: list[int], max_new_tokens: int, salt: bool, is_possible: bool) -> None:
        """Queue a request; `is_possible`: one that can be served."""
        if is_possible or not self._refuses:
            longest = min(self.max_model_len, self.num_blocks // self.declared.num_groups * self.block_size)
            max_new_tokens = min(max_new_tokens, longest - 1)
            token_ids = token_ids[: longest - max_new_tokens]
        if not token_ids or max_new_tokens < 1:
            raise NotApplicable
        chosen = salt_of(request_id) if salt and self.has_salts else ""
        request = self.new_request(request_id, token_ids, max_new_tokens, chosen)
        self.history.append(list(token_ids))
        salted = {"salt": request.salt} if request.salt else {}
        arguments = (request.request_id, token_ids, max_new_tokens)
        if self.fits(request.num_total):
            self.subject.do(Invariant.ADMISSION, "add", *arguments, **salted)
        else:
            error = self.subject.error_of("add", *arguments, **salted)
            # The last token is sampled and not fed: whether it needs a slot is the engine's own choice.
            if error is not None or not self.fits(request.num_total - 1):
                self._check_refusal(request, error)
                return
        self.requests[request.request_id] = request

    @action(
        request_id=NEW,
        token_ids=SIMILAR_PROMPTS,
        max_new_tokens=st.integers(1, 5),
    )
    def add_similar(self, request_id: int, token_ids: list[int], max_new_tokens: int) -> None:
        """Queue a request that begins like an earlier one."""
        self.add(request_id, token_ids, max_new_tokens, False, True)

    @action(
        when=lambda self: self.offers["fork"] and self.requests and not self.in_flight,
        request_id=one_of(lambda self: list(self.requests.values())),
        child_id=NEW,
    )
    def fork(self, request_id: int, child_id: int) -> None:
        """Continue a request twice."""
        parent = known(self.requests.values(), request_id)
        if self.in_flight:
            raise NotApplicable
        child = self.new_request(child_id, parent.token_ids, parent.num_left, parent.salt)
        child.arrival, child.is_generating = parent.arrival, parent.is_generating
        self.subject.do(Invariant.REMOVAL, "fork", parent.request_id, child.request_id)
        self.requests[child.request_id] = child
        self.note_running()
        if child.is_running:
            child.num_computed, child.prefixes = parent.num_computed, list(parent.prefixes)
            self.reuse.note_fork(parent, child)

    @action(
        when=lambda self: self.offers["abort"],
        request_id=one_of(lambda self: list(self.requests.values())),
    )
    def abort(self, request_id: int) -> None:
        """Abort a request in any state."""
        self.remove(known(self.requests.values(), request_id), "abort")

    @action(
        when=lambda self: self.offers["propose"],
        request_id=one_of(lambda self: self._may_propose()),
        token_ids=token_lists(4),
    )
    def propose(self, request_id: int, token_ids: list[int]) -> None:
        """Propose draft tokens for a request's next step."""
        request = known(self.requests.values(), request_id)
        token_ids = token_ids[: self.declared.max_draft_tokens]
        if request not in self._may_propose() or not token_ids:
            raise NotApplicable
        self.subject.do(Invariant.REMOVAL, "propose", request_id, list(token_ids))
        request.drafts = token_ids

    # Steps

    @action(
        weight=6, when=lambda self: self.requests, sampled=SAMPLED, num_accepted=st.integers(0, 4)
    )  # fmt: skip
    def step(self, sampled: list[int], num_accepted: int) -> None:
        """Plan a step; report the oldest if the maximum number is in flight."""
        if not self.requests:
            raise NotApplicable
        self.plan(sampled, num_accepted)
        if len(self.in_flight) >= self.declared.max_steps_in_flight:
            self.report()

    @action(weight=2, when=lambda self: self.in_flight)
    def finish_step(self) -> None:
        """Report the oldest step in flight before the next is planned."""
        if not self.in_flight:
            raise NotApplicable
        self.report()

    # What must always hold

    def check(self) -> None:
        """Verify tables, owners, free blocks, content and cache, as far as the adapter shows them."""
        if self.offers["block_table"]:
            self.tables.knows_all = self.offers["running"] and not self.has_ended_in_flight()
            self.tables.refresh()
            self.tables.check()
            if self.offers["cached_blocks"]:
                self.entries.check_entries()
        elif self.offers["num_free"] and not self.requests and not self.in_flight:
            self._check_all_free()

    def drain(self) -> None:
        """Run steps without arrivals: within a fixed number of steps, some request must make progress."""
        patience = MAX_EMPTY_STEPS + sum(request.num_total for request in self.requests.values())
        num_reported, num_steps = self._num_reported(), 0
        while self.requests:
            self.step([], 0)
            self.check()
            num_steps += 1
            if self._num_reported() != num_reported:
                num_reported, num_steps = self._num_reported(), 0
            if num_steps > patience:
                raise Violation(
                    Invariant.PROGRESS,
                    f"requests {sorted(self.requests)} do not get on: {num_steps} steps change nothing",
                    f"assert False, 'requests {sorted(self.requests)} do not get on'",
                )
        while self.in_flight:
            self.report()
            self.check()

    def _num_reported(self) -> tuple[int, int]:
        return len(self.requests), sum(request.num_reported for request in self.requests.values())

    def _check_all_free(self) -> None:
        num_free = self.subject.ask(Invariant.POOL_PARTITION, "num_free")
        if num_free != self.num_blocks:
            raise Violation(
                Invariant.ALL_FREED,
                f"no request is left, and {num_free} of {self.num_blocks} blocks are free",
                f"assert {self.subject.name}.num_free() == {self.num_blocks}",
            )

    def _may_propose(self) -> list[ScheduledRequest]:
        """Return the generating requests without tokens in flight or drafts."""
        if self.in_flight:
            return []
        return [request for request in self.requests.values() if request.is_generating and not request.drafts]

    def _check_refusal(self, request: ScheduledRequest, error: Exception | None) -> None:
        size = f"{len(request.token_ids)} tokens and {request.num_left} new ones"
        if error is None:
            raise Violation(
                Invariant.ADMISSION,
                f"a request of {size} was accepted, where {self.max_model_len} are the longest and {self.num_blocks} "
                f"blocks of {self.block_size} all there are",
                "raise AssertionError('it was accepted')",
            )
        if len(re.findall(r"\d+", str(error))) < 2:
            self.note(Invariant.ADMISSION, f"a request of {size} was refused without the numbers: {error!r}")


def search_scheduler(
    factory: Callable[..., Any], settings: Settings, *, accepted: Collection[int] = (), is_first_enough: bool = False
) -> SearchReport:
    """Search for arrivals and steps that break an invariant; return every broken invariant once.

    `factory` makes an adapter, see `SchedulerAdapter`. `is_first_enough`: stop at the first finding.

    Raises:
        HarnessError: BAD_ADAPTER: the adapter lacks a method.
    """
    adapter = NamedAdapter.of(factory)
    refuses = Invariant.ADMISSION not in accepted  # if accepted, queue no impossible request
    return search(lambda: SchedulerMachine(adapter, refuses=refuses), settings, is_first_enough=is_first_enough)


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Return what the adapter does not offer, each with the invariants that are not fully checked without it."""
    adapter = NamedAdapter.of(factory)
    declared = SchedulerCapabilities.of(adapter)
    subject = Subject(
        adapter, "scheduler", required=REQUIRED, num_blocks=max(declared.pool_sizes),
        block_size=declared.block_sizes[-1], max_num_batched_tokens=max(declared.budgets), max_num_seqs=2,
        max_model_len=max(declared.max_model_lens),
    )  # fmt: skip
    lines = not_offered(subject, "scheduler", OPTIONAL, "add", 10)
    if not declared.refuses_impossible:
        lines.append("scheduler: it declares refuses_impossible = False: requests that can never be served (21)")
    if not declared.reuses_prefixes:
        lines.append("scheduler: it does not declare reuses_prefixes: what a request must find in the cache (17)")
    if declared.max_steps_in_flight == 1:
        lines.append(
            "scheduler: it does not declare max_steps_in_flight = 2: steps planned while one is in flight (23)"
        )
    if not declared.has_groups:
        lines.append("scheduler: it does not declare windows: groups of layers with a sliding window (7)")
    most, longest = max(declared.pool_sizes), max(declared.block_sizes)
    lines.append(
        f"scheduler: pools of more than {most} blocks, blocks of more than {longest} tokens, budgets above "
        f"{max(declared.budgets)} tokens, requests of more than {max(declared.max_model_lens)}, and more than "
        f"{MOST_SEQS} at once"
    )
    return [*lines, "scheduler: 24 needs an engine's output, 26 more than one rank"]
