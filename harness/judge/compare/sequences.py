"""An engine's rows as sequences: for every position of a request the row that stands for it, of any request.

HF's forward needs whole sequences, engines compute them in pieces. A request's rows are put side by side by position;
what it found in the cache is what another request with the same tokens computed. Where a request computes a position
again (it was preempted, or its engine has no cache), a new sequence begins. Its history is what earlier rows left.

An engine that records its slots and block tables says which rows its cache held: of several with the same tokens, which
differ by their rounding, those are the history.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.formats.recording import Recording, RequestInfo, Step
from harness.judge.compare.align import all_rows, is_readback
from harness.judge.compare.prefixes import Prefixes
from harness.judge.compare.slot_history import SlotHistory

NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSequence:
    """Rows of one request from position 0 on; int64 tensors [tokens]."""

    request: RequestInfo
    step: torch.Tensor
    """Step that computed it; -1 where no step did."""
    row: torch.Tensor
    """Row within that step."""
    is_own: torch.Tensor
    """bool: computed by this request in this sequence, and to be judged in it."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the sequence."""
        return list(self.request.token_ids[: len(self)])


def sequences(recording: Recording) -> list[RowSequence]:
    """Return the sequences of a recording, in the order of the requests; each computed row is judged in one of them."""
    computed = _Computed(recording)
    return [sequence for request in recording.manifest.requests for sequence in computed.of(request)]


class _Computed:
    """All rows that an engine computed, by request and by content."""

    def __init__(self, recording: Recording) -> None:
        self._steps: Sequence[Step] = [step for step in recording.steps if not is_readback(step)]
        self._prefixes = Prefixes(recording.manifest.requests)
        self._first = self._first_by_content()
        self._recording = recording

    @cached_property
    def _slots(self) -> SlotHistory:
        return SlotHistory(self._recording)

    def _first_by_content(self) -> torch.Tensor:
        """[prefixes, 2] int64: step and row that computed each prefix first; -1 for none."""
        first = torch.full((self._prefixes.count, 2), NOWHERE, dtype=torch.int64)
        for step in reversed(self._steps):
            rows = all_rows(step)
            numbers = torch.arange(len(rows))
            first[self._prefixes.of(rows).flip(0)] = torch.stack([rows.step, numbers], dim=1).flip(0)
        return first

    def of(self, request: RequestInfo) -> Iterator[RowSequence]:
        """Yield the sequences of a request, one for every time that it begins anew."""
        rows = self._rows_of(request.id)
        began = latest = self._inherited(request, rows)
        own, table = dict[int, tuple[int, int]](), None
        for position, step, row in rows:
            history, blocks = latest, self._slots.table(step, request.id)
            if table is None or blocks[: len(table)] != table:  # its first step, or it was given other blocks
                history = self._as_cached(request.id, position, step, latest)
            if own and (position in own or not (history is latest or torch.equal(history, latest))):
                yield _sequence(request, began, own)
                own = {}
            if not own:
                began, latest = history, history.clone()
            own[position] = step, row
            latest[position] = torch.tensor([step, row])
            table = blocks
        if own:
            yield _sequence(request, began, own)

    def _as_cached(self, request: int, end: int, step: int, latest: torch.Tensor) -> torch.Tensor:
        """Return [tokens, 2] with the rows that the cache held, in a step, of the positions before `end`.

        Where the engine does not say, and where its table leads to other tokens, which is for attention to find, the
        rows stay that are there.
        """
        if not end or not self._slots.is_known:
            return latest
        history, meant = latest.clone(), self._prefixes.up_to(request, end).tolist()
        for position, slot in enumerate(self._slots.slots(self._slots.table(step, request), end)):
            write = self._slots.writer(slot, step)
            if write is not None and self._prefixes.at(write.request, write.position) == meant[position]:
                history[position] = torch.tensor([write.step, write.row])
        return history

    def _rows_of(self, request: int) -> list[tuple[int, int, int]]:
        """Position, step and row of every row of a request, in the order in which they were computed."""
        found = []
        for step in self._steps:
            places = (step.request == request).nonzero()[:, 0].tolist()
            found += [(int(step.position[row]), step.index, row) for row in places]
        return found

    def _inherited(self, request: RequestInfo, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """[tokens, 2]: what others with the same tokens computed, in the place of rows that the request left out.

        Of a copy, what its original computed, else what was computed first. It left out those before its first row, and
        where it was preempted and found more in the cache than it had computed, those before the row that it went on
        with.
        """
        table = torch.full((len(request.token_ids), 2), NOWHERE, dtype=torch.int64)
        reached = 0
        for position, step, _ in rows:
            if position > reached:
                found = self._first[self._prefixes.up_to(request.id, position)][reached:]
                found[found[:, 0] > step] = NOWHERE
                for source in (self._original_of(request), request.draft_of):
                    if source is not None:
                        self._take_latest(source, range(reached, position), step, found)
                table[reached:position] = found
            reached = max(reached, position + 1)
        return table

    def _original_of(self, request: RequestInfo) -> int | None:
        """Return the first request with the same tokens, if there is one before this."""
        own = request.token_ids, request.inputs
        first = next(item for item in self._recording.manifest.requests if (item.token_ids, item.inputs) == own)
        return first.id if first.id < request.id else None

    def _take_latest(self, request: int, positions: range, step: int, found: torch.Tensor) -> None:
        """Put in what a request computed last of some positions: its cache may have computed them more than once."""
        for position, at, row in self._rows_of(request):
            if at <= step and position in positions:
                found[position - positions.start] = torch.tensor([at, row])


def _sequence(request: RequestInfo, history: torch.Tensor, own: Mapping[int, tuple[int, int]]) -> RowSequence:
    """Put rows of a request, by position, into a history and after its end: [tokens, 2] of steps and rows."""
    length = max(own) + 1
    sequence = RowSequence(
        request=request,
        step=history[:length, 0].clone(),
        row=history[:length, 1].clone(),
        is_own=torch.zeros(length, dtype=torch.bool),
    )
    for position, (step, row) in own.items():
        sequence.step[position], sequence.row[position] = step, row
        sequence.is_own[position] = True
    return sequence
