"""Prefixes that a request must find when it is queued again: invariants 14 and 17, through the scheduler."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.properties.blocks.expected_hits import ExpectedHits
from harness.properties.core.findings import Violation
from harness.properties.scheduler.requests import Chunk, ScheduledRequest

if TYPE_CHECKING:
    from harness.properties.scheduler.calls import SchedulerCalls

__all__ = ["Reuse"]


class Reuse:
    """Compares the first chunk of each request with what was computed before.

    Evictions are seen in the block tables of all running requests, so that nothing is expected where the scheduler does
    not show both.
    """

    def __init__(self, calls: "SchedulerCalls") -> None:
        self._calls = calls
        self._hits = ExpectedHits(calls.tables, calls.block_size)
        self.is_checked = (
            calls.declared.reuses_prefixes
            and calls.offers["block_table"]
            and calls.offers["running"]
            and not calls.declared.has_groups
            and not calls.collides
        )

    def note_computed(self, request: ScheduledRequest) -> None:
        """Note what a request has computed."""
        if self.is_checked:
            self._hits.note_computed(request)

    def note_fork(self, parent: ScheduledRequest, child: ScheduledRequest) -> None:
        """Note that a request has computed what another has."""
        if self.is_checked:
            self._hits.note_computed(parent)
            self._hits.note_computed(child, like=parent)

    def note_released(self, request: ScheduledRequest, *, is_kept: bool) -> None:
        """Note that a request gives its blocks up; `is_kept`: the cache has to keep what was reported as computed."""
        if self.is_checked and request.is_running:
            self._hits.note_computed(request)
            chunks = (chunk for step in self._calls.in_flight for chunk in step.chunks)
            in_flight = (chunk.start for chunk in chunks if chunk.request_id == request.request_id)
            self._hits.note_released(request, num_kept=min(in_flight, default=request.num_computed) if is_kept else 0)

    def check(self, chunks: Sequence[Chunk], was_running: Collection[int], before: Mapping[int, Sequence[int]]) -> None:
        """Verify how much each request that starts has found, after all blocks of the step are handed out."""
        if not self.is_checked:
            return
        starting = [chunk for chunk in chunks if chunk.request_id not in was_running]
        found = {chunk.request_id: chunk.start // self._calls.block_size for chunk in starting}
        for request_id, request in self._calls.tables.live.items():
            is_starting = request_id in found
            new = request.table[found[request_id] :] if is_starting else set(request.table) - set(before[request_id])
            self._hits.note_allocated(new)
        for chunk in starting:
            self._check_start(chunk, self._calls.requests[chunk.request_id])

    def _check_start(self, chunk: Chunk, request: ScheduledRequest) -> None:
        at_least = self._hits.num_tokens(request.token_ids, request.salt)
        if chunk.start < at_least:
            self._calls.note(
                Violation(
                    17,
                    f"request {chunk.request_id} starts at position {chunk.start}; {at_least} tokens were computed "
                    "before, and nothing was evicted since",
                    f"assert min(start for id, start, _ in result if id == {chunk.request_id}) >= {at_least}",
                )
            )
