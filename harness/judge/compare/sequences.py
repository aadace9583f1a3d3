"""An engine's rows as sequences: for every position of a request the row that stands for it, of any request.

HF's forward needs whole sequences; engines compute them in pieces. A request's rows are put side by side by position.
What the request read from the cache is what another request with the same tokens computed. Where a request computes a
position again (it was preempted, or its engine has no cache), a new sequence begins. Its history is what earlier rows
left.

An engine that records its slot mappings and block tables says which rows its cache held (`SlotHistory`). Of several
rows with the same tokens, which differ by their rounding, those are the history. Nothing is guessed: where attention
follows from the recorded tables, attention itself is right and the cache's content is wrong.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.errors import Code
from harness.formats.recording import Recording, RequestInfo, Step
from harness.judge.compare.align import Prefixes, all_rows, is_readback
from harness.results.check import Finding

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
    """bool: computed by this request in this sequence."""
    is_seen: torch.Tensor | None = None
    """bool: judged before; None for none."""

    @property
    def is_judged(self) -> torch.Tensor:
        """bool: to be judged in this sequence."""
        return self.is_own if self.is_seen is None else self.is_own & ~self.is_seen

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
    def _slots(self) -> "SlotHistory":
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
        """Yield the sequences of a request: a new one begins where the request starts again."""
        rows = self._rows_of(request.id)
        began = latest = self._inherited(request, rows)
        computed, table = dict[int, tuple[int, int]](), None
        for position, step, row in rows:
            history, blocks = latest, self._slots.table(step, request.id)
            if table is None or blocks[: len(table)] != table:  # its first step, or its blocks were replaced
                history = self._as_cached(request.id, position, step, latest)
            if computed and (position in computed or not (history is latest or torch.equal(history, latest))):
                yield _sequence(request, began, computed)
                computed = {}
            if not computed:
                began, latest = history, history.clone()
            computed[position] = step, row
            latest[position] = torch.tensor([step, row])
            table = blocks
        if computed:
            yield _sequence(request, began, computed)

    def _as_cached(self, request: int, end: int, step: int, latest: torch.Tensor) -> torch.Tensor:
        """Return [tokens, 2] with the rows that the cache held, in a step, of the positions before `end`.

        Where the engine does not record it, the rows of `latest` stay. They also stay where the table leads to other
        tokens: the judgement of attention finds that.
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
        """Return position, step and row of every row of a request, in the order in which they were computed."""
        computed = []
        for step in self._steps:
            places = (step.request == request).nonzero()[:, 0].tolist()
            computed += [(int(step.position[row]), step.index, row) for row in places]
        return computed

    def _inherited(self, request: RequestInfo, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """[tokens, 2]: the rows of other requests with the same tokens, for the rows that the request left out.

        For a copy these are the rows of its original, otherwise the rows that were computed first. A request leaves out
        the rows before its first one. Where it was preempted and found more in the cache than it had computed, it
        leaves out the rows before the one with which it resumed.
        """
        table = torch.full((len(request.token_ids), 2), NOWHERE, dtype=torch.int64)
        reached = 0
        for position, step, _ in rows:
            if position > reached:
                inherited = self._first[self._prefixes.up_to(request.id, position)][reached:]
                inherited[inherited[:, 0] > step] = NOWHERE
                for source in (self._original_of(request), request.draft_of):
                    if source is not None:
                        self._take_latest(source, range(reached, position), step, inherited)
                table[reached:position] = inherited
            reached = max(reached, position + 1)
        return table

    def _original_of(self, request: RequestInfo) -> int | None:
        """Return the first request with the same tokens, if there is one before this."""
        content = request.token_ids, request.inputs
        first = next(item for item in self._recording.manifest.requests if (item.token_ids, item.inputs) == content)
        return first.id if first.id < request.id else None

    def _take_latest(self, request: int, positions: range, step: int, inherited: torch.Tensor) -> None:
        """Replace the inherited rows of some positions by those that a request computed last."""
        for position, at, row in self._rows_of(request):
            if at <= step and position in positions:
                inherited[position - positions.start] = torch.tensor([at, row])


def _sequence(request: RequestInfo, history: torch.Tensor, computed: Mapping[int, tuple[int, int]]) -> RowSequence:
    """Return a history [tokens, 2] of steps and rows with the rows that a request computed, by position."""
    length = max(computed) + 1
    sequence = RowSequence(
        request=request,
        step=history[:length, 0].clone(),
        row=history[:length, 1].clone(),
        is_own=torch.zeros(length, dtype=torch.bool),
    )
    for position, (step, row) in computed.items():
        sequence.step[position], sequence.row[position] = step, row
        sequence.is_own[position] = True
    return sequence


_MAX_BLOCK_SIZE = 4096
_SAMPLED_ROWS = 4096
"""Rows by which the size of a block is found: the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Write:
    """A row whose key and value were stored."""

    step: int
    row: int
    request: int
    position: int

    def __str__(self) -> str:
        return f"request {self.request}, position {self.position}, step {self.step}"


class SlotHistory:
    """Slots of the KV cache over the steps of a recording."""

    def __init__(self, recording: Recording) -> None:
        """Read nothing yet."""
        self.recording = recording
        self._tables: dict[int, Mapping[int, list[int]]] = {}

    @cached_property
    def _writes(self) -> Mapping[int, Sequence[Write]]:
        """The writes of each slot, in the order of the steps."""
        writes: dict[int, list[Write]] = {}
        for step in self.recording.steps:
            if is_readback(step) or step.slot_mapping is None:
                continue
            rows = zip(step.slot_mapping.tolist(), step.request.tolist(), step.position.tolist(), strict=True)
            for row, (slot, request, position) in enumerate(rows):
                if slot >= 0:
                    write = Write(step=step.index, row=row, request=request, position=position)
                    writes.setdefault(slot, []).append(write)
        return writes

    @property
    def is_known(self) -> bool:
        """Whether the engine recorded its slot mappings and block tables."""
        return bool(self._writes) and self.block_size is not None

    @cached_property
    def block_size(self) -> int | None:
        """Tokens in a block: the size under which most slots agree with the block tables."""
        best, most, sample = None, 0, self._sample()
        for size in range(1, _MAX_BLOCK_SIZE + 1):
            if size > 256 and size & (size - 1):
                continue
            agreeing = sum(
                position // size < len(table) and table[position // size] * size + position % size == slot
                for slot, position, table in sample
            )
            if agreeing > most:
                best, most = size, agreeing
            if most == len(sample):  # a larger size cannot do better
                break
        return best

    def _sample(self) -> list[tuple[int, int, Sequence[int]]]:
        """Return the entries of the first steps."""
        sample: list[tuple[int, int, Sequence[int]]] = []
        for entries in self._entries.values():
            if len(sample) < _SAMPLED_ROWS:
                sample += entries
        return sample

    @cached_property
    def _entries(self) -> dict[int, list[tuple[int, int, Sequence[int]]]]:
        """Slot, position and block table of every row of every step."""
        entries: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
        for step in self.recording.steps:
            tables = step.block_tables
            if is_readback(step) or step.slot_mapping is None or not tables:
                continue
            rows = zip(step.slot_mapping.tolist(), step.request.tolist(), step.position.tolist(), strict=True)
            entries[step.index] = [(slot, position, tables.get(request, ())) for slot, request, position in rows]
        return entries

    def table(self, step: int, request: int) -> list[int]:
        """Return the block table of a request in a step; empty if it was not recorded."""
        if step not in self._tables:
            self._tables[step] = self.recording.steps[step].block_tables or {}
        return self._tables[step].get(request, [])

    def slots(self, table: Sequence[int], count: int) -> list[int]:
        """Return the slots of the first `count` positions by a block table, up to its end."""
        size = self.block_size or 1
        return [block * size + offset for block in table for offset in range(size)][:count]

    def writer(self, slot: int, step: int) -> Write | None:
        """Return the last write of a slot, up to and including a step."""
        writes = self._writes.get(slot, [])
        end = bisect_right(writes, step, key=lambda write: write.step)
        return writes[end - 1] if end else None

    def written_slots(self, step: int) -> list[int]:
        """Return the slots that were written by the end of a step."""
        return [slot for slot, writes in self._writes.items() if writes[0].step <= step]

    def misplaced(self, step: int) -> list[tuple[int, int, int, int]]:
        """Return (request, position, slot written, slot by the block table) of rows in another slot."""
        size, wrong = self.block_size or 1, []
        entries = self._entries.get(step, [])
        requests = self.recording.steps[step].request.tolist()
        for request, (slot, position, table) in zip(requests, entries, strict=False):
            if position // size < len(table):
                meant = table[position // size] * size + position % size
                if meant != slot:
                    wrong.append((request, position, slot, meant))
        return wrong

    def content(self, writes: Sequence[Write | None], tap: str) -> torch.Tensor | None:
        """Return what was written of a tap, [writes, ...] float64 flat, zeros for None; None if not recorded."""
        sample = next((step for step in self.recording.steps if step.has(tap)), None)
        if sample is None:
            return None
        content = torch.zeros(len(writes), sample.tap(tap)[0].numel(), dtype=torch.float64)
        by_step: dict[int, list[int]] = {}
        for at, write in enumerate(writes):
            if write is not None:
                by_step.setdefault(write.step, []).append(at)
        for index, places in by_step.items():
            step = self.recording.steps[index]
            if not step.has(tap) or step.rows_of(tap) is not None:
                return None
            rows = [write.row for at in places if (write := writes[at]) is not None]
            content[places] = step.tap(tap)[rows].flatten(1).to(torch.float64)
        return content


def slot_conflicts(recording: Recording) -> list[Finding]:
    """Return a finding for the first step in which requests with different tokens write the same slot.

    It is a bug of the engine's block tables. Or two steps were recorded as one, and the second used slots that the
    first had freed.
    """
    prefixes = Prefixes(recording.manifest.requests)
    for step in recording.steps:
        if step.slot_mapping is not None and not is_readback(step):
            pair = _first_conflict(step, step.slot_mapping, prefixes)
            if pair is not None:
                return [_finding(step, step.slot_mapping, *pair)]
    return []


def _first_conflict(step: Step, slots: torch.Tensor, prefixes: Prefixes) -> tuple[int, int] | None:
    """Return two rows of different requests and different tokens that have one slot."""
    written = (slots >= 0).nonzero()[:, 0]
    order = written[torch.argsort(slots[written], stable=True)]
    first, second = order[:-1], order[1:]
    is_shared = (slots[first] == slots[second]) & (step.request[first] != step.request[second])
    for first_row, second_row in zip(first[is_shared].tolist(), second[is_shared].tolist(), strict=True):
        tokens = [prefixes.at(int(step.request[row]), int(step.position[row])) for row in (first_row, second_row)]
        if tokens[0] != tokens[1]:
            return first_row, second_row
    return None


def _finding(step: Step, slots: torch.Tensor, first_row: int, second_row: int) -> Finding:
    rows = [f"request {int(step.request[row])}, position {int(step.position[row])}" for row in (first_row, second_row)]
    message = f"step {step.index} writes slot {int(slots[first_row])} twice: {rows[0]}, and {rows[1]}"
    request, position = int(step.request[second_row]), int(step.position[second_row])
    return Finding(code=Code.SLOT_WRITTEN_TWICE, message=message, request=request, position=position)
