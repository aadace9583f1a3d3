"""Forced drafts for the reference engine: what each step guesses, and whose rows these are."""

from collections.abc import Sequence

from harness.engines.adapter import Part, Workload
from harness.formats.recording import RequestInfo
from reference_engine.requests.sequence import Sequence as EngineSequence


class ForcedDrafts:
    """Guesses what a workload says, whatever the engine would, and tells rejected rows from others."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.request_ids: dict[int, int] = {}
        """By the engine's own number of a request, its id."""
        self._steps = {request.id: _by_start(workload, request) for request in workload.requests}
        self._drafting: dict[int, RequestInfo] = {}

    def draft(self, sequence: EngineSequence) -> Sequence[int]:
        """See `reference_engine.speculation.Drafter`."""
        parts = self._steps[self.request_ids[sequence.request_id]].get(sequence.num_tokens - 1, [])
        return [token for request, part in parts for token in request.token_ids[part.start : part.stop]][1:]

    def detour(self, request: RequestInfo) -> RequestInfo | None:
        """Return what a request computes first and goes back over; None if it does not."""
        if self._workload.schedule.num_drafts:
            return None
        return next(iter(self._workload.drafts(request)), None)

    def begin(self, request: RequestInfo, detour: RequestInfo | None) -> None:
        """Take the rows of a request after the prompt for those of its detour, or for its own again."""
        if detour is None:
            self._drafting.pop(request.id, None)
        else:
            self._drafting[request.id] = detour

    def whose(self, own: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Return the request of each row of a step, a rejected draft's own: it is computed from other tokens."""
        firsts = dict(zip(reversed(own), reversed(positions), strict=True))
        drafts = {number: self._rejected(self.request_ids[number], first) for number, first in firsts.items()}
        found = []
        for number, position in zip(own, positions, strict=True):
            draft = drafts[number]
            is_rejected = draft is not None and position >= draft.prompt_length
            found.append(draft.id if draft is not None and is_rejected else self.request_ids[number])
        return found

    def _rejected(self, request: int, first: int) -> RequestInfo | None:
        """Return the draft that is given up after a request's step that begins at a position."""
        parts = self._steps.get(request, {}).get(first, [])
        return parts[-1][0] if len(parts) > 1 else self._drafting.get(request)


def _by_start(workload: Workload, request: RequestInfo) -> dict[int, list[Part]]:
    """Return the steps after the prompt by the position that they begin at."""
    if not workload.schedule.num_drafts:
        return {}
    return {parts[0][1].start: parts for parts in workload.steps(request) if parts[0][1].start}
