"""Prefixes that a request must find when it is queued again: invariants 14 and 17, through the scheduler."""

from collections.abc import Callable, Collection, Mapping, Sequence

from harness.properties.blocks.expected_hits import ExpectedHits
from harness.properties.blocks.tables import Tables
from harness.properties.core.invariants import Invariant
from harness.properties.scheduler.requests import Chunk, ScheduledRequest, ScheduledStep


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
        found = {chunk.request_id: chunk.start // self._block_size for chunk in starting}
        for request_id, request in self._tables.live.items():
            is_starting = request_id in found
            new = request.table[found[request_id] :] if is_starting else set(request.table) - set(before[request_id])
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
