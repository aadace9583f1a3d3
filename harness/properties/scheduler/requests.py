"""Requests of a scheduler, the steps that compute them, the limits of one step, and prefixes that must be found again.

Limits are invariants 19, 20 and 22; a request that is queued again must find its prefix (14 and 17).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.properties.blocks.prefix_cache import ExpectedHits
from harness.properties.blocks.tables import RequestRecord, Tables
from harness.properties.core.findings import Invariant, Violation
from harness.properties.scheduler.adapter import SchedulerCapabilities


class Chunk(NamedTuple):
    """The part of one request that one step computes: the positions `start` to `stop - 1`."""

    request_id: int
    start: int
    stop: int


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest(RequestRecord):
    """A request with its place in the queue.

    `token_ids` has all tokens that are sampled, those of steps in flight among them.
    """

    arrival: int
    """Its number, a fork's that of its parent."""
    num_left: int
    """Tokens that it may still sample."""
    num_total: int = 0
    """Tokens when it ends at the latest."""
    num_reported: int = 0
    """Tokens that the scheduler knows."""
    is_running: bool = False
    was_preempted: bool = False
    is_generating: bool = False
    """Whether it has sampled since it was started or resumed."""
    drafts: list[int] = field(default_factory=list)
    """Tokens that were proposed for its next step."""

    def __post_init__(self) -> None:
        self.num_total = len(self.token_ids) + self.num_left
        self.num_reported = len(self.token_ids)

    def is_single_token(self, chunk: Chunk) -> bool:
        """Whether a chunk computes what the request sampled last, and perhaps drafts after it."""
        return self.is_generating and chunk.start == len(self.token_ids) - 1


@dataclass(slots=True, kw_only=True)
class ScheduledStep:
    """A step that is planned and not yet reported."""

    chunks: Sequence[Chunk]
    sampled: dict[int, list[int]] = field(default_factory=dict)
    """By request that has caught up, the tokens that it samples."""
    ended: set[int] = field(default_factory=set)
    """Requests that end with this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The limits of a scheduler; `note` takes violations after which the example can go on."""

    declared: SchedulerCapabilities
    budget: int
    max_num_seqs: int
    max_model_len: int
    note: Callable[[Invariant, str, str], None]

    def check_chunks(self, chunks: Sequence[Chunk], requests: Mapping[int, ScheduledRequest]) -> None:
        """Verify which requests a step computes, and how much of them.

        Raises:
            Violation: a chunk is of no request, or of positions that it does not have.
        """
        ids = [chunk.request_id for chunk in chunks]
        if len(set(ids)) < len(ids) or not set(ids) <= requests.keys():
            raise Violation(
                Invariant.STEP_BUDGET,
                f"requests {ids} are scheduled, where {sorted(requests)} are there",
                f"assert sorted(chunk[0] for chunk in result) == {sorted(set(ids) & requests.keys())}",
            )
        for chunk in chunks:
            self._check_chunk(chunk, requests[chunk.request_id])
        self._check_budget(chunks, [chunk for chunk in chunks if self._counts(chunk, requests[chunk.request_id])])
        if len(chunks) > self.max_num_seqs:
            self.note(
                Invariant.RUNNING_LIMIT,
                f"{len(chunks)} requests are scheduled, where {self.max_num_seqs} may run",
                f"assert len(result) <= {self.max_num_seqs}",
            )

    def _check_chunk(self, chunk: Chunk, request: ScheduledRequest) -> None:
        num_tokens, source = len(request.token_ids), f"{tuple(chunk)} not in map(tuple, result)"
        num_extra = len(request.drafts) + self.declared.max_tokens_per_step - 1
        most = num_tokens + num_extra if num_extra else min(num_tokens, request.num_total)
        if not 0 <= chunk.start < chunk.stop <= most or chunk.start >= num_tokens:
            drafts = f" and {num_extra} more in this step" if num_extra else ""
            raise Violation(
                Invariant.STEP_BUDGET,
                f"request {chunk.request_id} is scheduled from {chunk.start} to {chunk.stop} and has {num_tokens} "
                f"tokens{drafts}",
                f"assert {source}",
            )
        if chunk.stop > self.max_model_len:
            raise Violation(
                Invariant.TABLE_WIDTH,
                f"request {chunk.request_id} is scheduled up to {chunk.stop}, beyond {self.max_model_len}",
                f"assert {source}",
            )
        if not self.declared.chunks_prompts and chunk.stop < request.num_reported:
            self.note(
                Invariant.STEP_BUDGET,
                f"request {chunk.request_id} is scheduled up to {chunk.stop} of {num_tokens} tokens, and the "
                "adapter declares chunks_prompts = False",
                f"assert {source}",
            )

    def _counts(self, chunk: Chunk, request: ScheduledRequest) -> bool:
        return self.declared.budget_covers == "all" or not request.is_single_token(chunk)

    def _check_budget(self, chunks: Sequence[Chunk], counted: Sequence[Chunk]) -> None:
        num_scheduled = sum(chunk.stop - chunk.start for chunk in counted)
        if num_scheduled > self.budget:
            ids = [chunk.request_id for chunk in counted]
            which = "" if len(counted) == len(chunks) else f" if id in {ids}"
            self.note(
                Invariant.STEP_BUDGET,
                f"{num_scheduled} tokens are scheduled within a budget of {self.budget}",
                f"assert sum(stop - start for id, start, stop in result{which}) <= {self.budget}",
            )

    def check_running(self, running: Collection[int], subject_name: str) -> None:
        """Verify how many requests run."""
        if self.declared.max_num_seqs_limits == "running" and len(running) > self.max_num_seqs:
            self.note(
                Invariant.RUNNING_LIMIT,
                f"requests {sorted(running)} run, where {self.max_num_seqs} may",
                f"assert len({subject_name}.running()) <= {self.max_num_seqs}",
            )

    def check_turns(
        self, chunks: Sequence[Chunk], requests: Mapping[int, ScheduledRequest], was_running: Collection[int]
    ) -> None:
        """Verify that no request starts before a preempted request that arrived earlier."""
        waiting = [request for request in requests.values() if request.was_preempted and not request.is_running]
        for chunk in chunks:
            starting = requests[chunk.request_id]
            for earlier in waiting if chunk.request_id not in was_running else ():
                if earlier.arrival < starting.arrival:
                    self.note(
                        Invariant.PROGRESS,
                        f"request {chunk.request_id} starts, and request {earlier.request_id}, which arrived before "
                        "it and was preempted, still waits",
                        f"assert {chunk.request_id} not in [chunk[0] for chunk in result]",
                    )
                    return


class Reuse:
    """Compares the first chunk of each request with what was computed before, if `is_checked`.

    Evictions are seen in the block tables of all running requests, so that nothing can be expected where the scheduler
    does not show both. `note` takes violations after which the example can go on.
    """

    def __init__(
        self, tables: Tables, block_size: int, note: Callable[[Invariant, str, str], None], *, is_checked: bool
    ) -> None:
        self._tables, self._block_size, self._note = tables, block_size, note
        self._hits = ExpectedHits(tables, block_size)
        self._is_checked = is_checked

    def note_computed(self, request: ScheduledRequest) -> None:
        """Note what a request has computed."""
        if self._is_checked:
            self._hits.note_computed(request)

    def note_fork(self, parent: ScheduledRequest, child: ScheduledRequest) -> None:
        """Note that a request has computed what another has."""
        if self._is_checked:
            self._hits.note_computed(parent)
            self._hits.note_computed(child, like=parent)

    def note_released(self, request: ScheduledRequest, in_flight: Sequence[ScheduledStep], *, is_kept: bool) -> None:
        """Note that a request gives its blocks up; `is_kept`: the cache has to keep what was reported as computed."""
        if self._is_checked and request.is_running:
            self._hits.note_computed(request)
            chunks = (chunk for step in in_flight for chunk in step.chunks)
            starts = (chunk.start for chunk in chunks if chunk.request_id == request.request_id)
            self._hits.note_released(request, num_kept=min(starts, default=request.num_computed) if is_kept else 0)

    def check(
        self,
        chunks: Sequence[Chunk],
        requests: Mapping[int, ScheduledRequest],
        was_running: Collection[int],
        before: Mapping[int, Sequence[int]],
    ) -> None:
        """Verify how much each request that starts has found, after all blocks of the step are handed out."""
        if not self._is_checked:
            return
        starting = [chunk for chunk in chunks if chunk.request_id not in was_running]
        num_cached_blocks = {chunk.request_id: chunk.start // self._block_size for chunk in starting}
        for request_id, request in self._tables.live.items():
            is_starting = request_id in num_cached_blocks
            new = (
                request.table[num_cached_blocks[request_id] :]
                if is_starting
                else set(request.table) - set(before[request_id])
            )
            self._hits.note_allocated(new)
        for chunk in starting:
            self._check_start(chunk, requests[chunk.request_id])

    def _check_start(self, chunk: Chunk, request: ScheduledRequest) -> None:
        at_least = self._hits.num_tokens(request.token_ids, request.salt)
        if chunk.start < at_least:
            self._note(
                Invariant.EXPECTED_HITS,
                f"request {chunk.request_id} starts at position {chunk.start}; {at_least} tokens were computed "
                "before, and nothing was evicted since",
                f"assert min(start for id, start, _ in result if id == {chunk.request_id}) >= {at_least}",
            )
