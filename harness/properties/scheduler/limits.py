"""Limits that the chunks of one step keep: invariants 19, 20 and 22."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.properties.core.findings import Violation
from harness.properties.core.invariants import Invariant
from harness.properties.scheduler.capabilities import SchedulerCapabilities
from harness.properties.scheduler.requests import Chunk, ScheduledRequest


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
            for other in waiting if chunk.request_id not in was_running else ():
                if other.arrival < starting.arrival:
                    self.note(
                        Invariant.PROGRESS,
                        f"request {chunk.request_id} starts, and request {other.request_id}, which arrived before "
                        "it and was preempted, still waits",
                        f"assert {chunk.request_id} not in [chunk[0] for chunk in result]",
                    )
                    return
