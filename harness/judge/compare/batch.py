"""Some sequences of an engine's rows, padded to one length, and the recorded rows of any tap in them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.formats.recording import Recording
from harness.judge.compare.align import Rows, joined
from harness.judge.compare.row_sample import RowSample
from harness.judge.compare.sequences import NOWHERE, RowSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRows:
    """The recorded rows of one tap in a batch."""

    places: torch.Tensor
    """[rows] int64: where each row stands, request times tokens, plus token."""
    rows: torch.Tensor
    """[rows, ...] in the dtype they were recorded in."""


class PaddedBatch:
    """Sequences side by side: [sequences, tokens], the shorter ones padded after their end."""

    def __init__(
        self,
        recording: Recording,
        sequences: Sequence[RowSequence],
        positions: torch.Tensor | None = None,
        ahead: int = 0,
    ) -> None:
        """Lay the sequences side by side.

        Args:
            recording: the engine's.
            sequences: of its rows.
            positions: [n] int64, ascending: those at which products and attention are judged; None for all.
            ahead: tokens of a request that layers see after a row's own, where it has so many more.
        """
        self.recording, self.sequences = recording, sequences
        self._tokens = [_tokens(sequence, ahead) for sequence in sequences]
        lengths = _rotary_lengths(recording)
        whole = {item.request.id: len(item.request.token_ids) for item in sequences if item.request.inputs}
        lengths_run = {**whole, **lengths}
        self.num_tokens = max(
            *(max(len(item), lengths_run.get(item.request.id, 0)) for item in sequences), *map(len, self._tokens)
        )
        self._step = self._padded([sequence.step for sequence in sequences], NOWHERE)
        self._row = self._padded([sequence.row for sequence in sequences], NOWHERE)
        self.is_own = self._padded([_is_judged(recording, sequence, lengths) for sequence in sequences], False)
        """[places] bool: rows that are judged in this batch."""
        self.positions = positions

    def _padded(self, columns: Sequence[torch.Tensor], fill: int | bool) -> torch.Tensor:
        """[places] of columns that are shorter than the batch."""
        table = torch.full((len(columns), self.num_tokens), fill, dtype=columns[0].dtype)
        for line, column in zip(table, columns, strict=True):
            line[: len(column)] = column
        return table.flatten()

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """[sequences, tokens] int64; padding is token 0, which no row of a sequence sees."""
        return self._padded([torch.tensor(tokens) for tokens in self._tokens], 0).view(-1, self.num_tokens)

    def is_followed(self, num_tokens: int) -> torch.Tensor:
        """[places] bool: where the batch has so many more tokens of the request."""
        ends = torch.tensor(list(map(len, self._tokens)))
        return (torch.arange(self.num_tokens) + num_tokens < ends[:, None]).flatten()

    @property
    def num_sampled(self) -> int:
        """Judged rows at the chosen positions."""
        lines = self.is_own.view(-1, self.num_tokens)
        return int((lines if self.positions is None else lines[:, self.positions]).sum())

    def is_whole(self, tap: str) -> bool:
        """Whether a tap was recorded in every row of every sequence."""
        covered = sum(len(self._covered(index, places, rows, tap)[0]) for index, places, rows in self._by_step)
        return covered == sum(map(len, self.sequences))

    @property
    def num_places(self) -> int:
        """Rows of the batch, padding included."""
        return len(self._step)

    def rows(self, places: torch.Tensor) -> Rows:
        """Return the identity of the rows at some places."""
        request = torch.tensor([sequence.request.id for sequence in self.sequences])
        return Rows(
            request=request[places // self.num_tokens], position=places % self.num_tokens, step=self._step[places]
        )

    @cached_property
    def _by_step(self) -> list[tuple[int, torch.Tensor, torch.Tensor | slice]]:
        """For each step: its index, the places of its rows, and the rows, as a slice where they lie side by side."""
        there = (self._step >= 0).nonzero()[:, 0]
        order = self._step[there].argsort(stable=True)
        steps, counts = self._step[there][order].unique_consecutive(return_counts=True)
        places = there[order].split(counts.tolist())
        return [(step, own, _as_slice(self._row[own])) for step, own in zip(steps.tolist(), places, strict=True)]

    def recorded(self, tap: str) -> RecordedRows | None:
        """Return the rows of a tap that were recorded; None if there are none."""
        parts = list(self._parts(tap))
        if not parts:
            return None
        return RecordedRows(places=joined([places for places, _ in parts]), rows=joined([rows for _, rows in parts]))

    def _parts(self, tap: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index, places, rows in self._by_step:
            there, found = self._covered(index, places, rows, tap)
            if len(there):
                yield there, self.recording.steps[index].tap(tap)[found]

    def _covered(
        self, index: int, places: torch.Tensor, rows: torch.Tensor | slice, tap: str
    ) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """Return the places of a step at which a tap was recorded, and where its rows stand among the recorded ones."""
        step = self.recording.steps[index]
        if not step.has(tap):
            return places[:0], rows
        covered = step.rows_of(tap)
        if covered is None:
            return places, rows
        where = torch.full((len(step.request),), NOWHERE, dtype=torch.int64)
        where[covered] = torch.arange(len(covered))
        found = where[rows]
        return places[found >= 0], found[found >= 0]


def _tokens(sequence: RowSequence, ahead: int) -> list[int]:
    """Return the tokens of a sequence, and those that follow; with images all of the request's."""
    tokens = list(sequence.request.token_ids)
    return tokens[: len(sequence) + ahead] if sequence.request.inputs is None else tokens


def _rotary_lengths(recording: Recording) -> dict[int, int]:
    """Return the length that the frequencies of each request follow; nothing where they follow that of a forward."""
    manifest = recording.manifest
    if manifest.numerics is None or not manifest.numerics.rotates_by_request:
        return {}
    lengths = {request.id: len(request.token_ids) for request in manifest.requests}
    return {item.id: lengths[item.id if item.draft_of is None else item.draft_of] for item in manifest.requests}


def _is_judged(recording: Recording, sequence: RowSequence, lengths: Mapping[int, int]) -> torch.Tensor:
    """[tokens] bool: its own rows, and cached ones of a request of another length, whose keys may not fit this one."""
    if not lengths:
        return sequence.is_own
    is_judged, own = sequence.is_own.clone(), lengths[sequence.request.id]
    for position in (sequence.step >= 0).nonzero()[:, 0].tolist():
        writer = int(recording.steps[int(sequence.step[position])].request[sequence.row[position]])
        is_judged[position] |= lengths[writer] != own
    return is_judged


def _as_slice(rows: torch.Tensor) -> torch.Tensor | slice:
    first, last = int(rows[0]), int(rows[-1])
    is_run = last - first == len(rows) - 1 and bool((rows.diff() == 1).all())
    return slice(first, last + 1) if is_run else rows


def make_batches(
    recording: Recording,
    sequences: Sequence[RowSequence],
    max_tokens: int,
    sample: RowSample | None = None,
    *,
    ahead: int = 0,
) -> list[PaddedBatch]:
    """Group sequences of similar lengths so that a batch has at most so many tokens, padding included.

    One with images is alone. With a sample each batch has its positions. For `ahead` see `PaddedBatch`.
    """
    groups: list[list[RowSequence]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        is_alone = bool(groups) and (sequence.request.inputs or groups[-1][-1].request.inputs)
        if groups and not is_alone and len(groups[-1][0]) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    positions = [None if sample is None else sample.positions(group, index) for index, group in enumerate(groups)]
    return [PaddedBatch(recording, *item, ahead) for item in zip(groups, positions, strict=True)]
