"""Sequences of an engine's rows, padded to one length, and the positions at which they are judged.

Products and attention may be judged in a sample of the positions. A sample states how many wrong rows it may miss.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Protocol

import torch

from harness.formats.recording import Recording
from harness.formats.recording.reader import Located
from harness.judge.compare.align import REQUEST_KEY, Rows
from harness.judge.compare.propagated import Propagation
from harness.judge.compare.sequences import NOWHERE, RowSequence

CONFIDENCE = 0.95
"""Probability that the sample holds one of `RowSample.least_found` wrong rows."""
_SHARE_STANDING_OUT = 4
"""Rows that are drawn for one row that stands out against the golden."""


class PositionSample(Protocol):
    """Chooses positions at which operations are computed."""

    def positions(self, group: Sequence[RowSequence], index: int) -> torch.Tensor | None:
        """Return the positions, [n] int64 and ascending, for requests that run side by side; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """A sample of the positions of each request.

    The positions are divided into stretches of equal length, and one position of each is drawn at random. The sample
    also holds the rows that differ most from the golden, and the first and last position that a step computed.
    """

    num_rows: int
    """Positions that are drawn."""
    seed: int = 0
    standing_out: Rows | None = None
    """The rows that differ most from the golden, for their tap, first; None if nothing was compared with it."""

    def positions(self, group: Sequence[RowSequence], index: int) -> torch.Tensor | None:
        """Return the positions, [n] int64 and ascending, for requests that run side by side; None for all.

        Args:
            group: their sequences.
            index: number of the group: each draws its own.
        """
        length = max(map(len, group))
        if length <= self.num_rows:
            return None
        borders = sorted({position for sequence in group for position in _borders(sequence)})
        chosen = {
            *self.drawn(range(length), index),
            *spread(borders, self.num_rows),
            *borders[-1:],
            *self._standing_out(group),
        }
        return None if len(chosen) == length else torch.tensor(sorted(chosen))

    def drawn(self, positions: Sequence[int], index: int) -> list[int]:
        """Return one position of each stretch, at random; there are more positions than stretches."""
        generator = Random(f"{self.seed}:{index}")
        edges = pairwise(at * len(positions) // self.num_rows for at in range(self.num_rows + 1))
        return [positions[generator.randrange(begin, end)] for begin, end in edges]

    def _standing_out(self, group: Sequence[RowSequence]) -> list[int]:
        if self.standing_out is None:
            return []
        is_of_group = torch.isin(self.standing_out.request, torch.tensor([sequence.request.id for sequence in group]))
        position = self.standing_out.position[is_of_group]
        inside = position < max(map(len, group))
        return position[inside][: max(1, self.num_rows // _SHARE_STANDING_OUT)].tolist()

    def least_found(self, length: int) -> int:
        """Return the least number of wrong rows, among `length` rows, of which one is drawn with `CONFIDENCE`.

        With k wrong rows among the s of a stretch, none is drawn with probability 1 - k / s. Over all stretches this
        probability is largest where they share the wrong rows evenly, and all are as long as the longest.
        """
        stretch = math.ceil(length / self.num_rows)
        return next(k for k in range(1, stretch * self.num_rows + 1) if self._missed(k, stretch) <= 1 - CONFIDENCE)

    def _missed(self, num_wrong: int, stretch: int) -> float:
        """Return the largest probability, over all places of the wrong rows, that none of them is drawn."""
        per_stretch, more = divmod(num_wrong, self.num_rows)
        return float((1 - (per_stretch + 1) / stretch) ** more * (1 - per_stretch / stretch) ** (self.num_rows - more))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Numbers of rows that a sample holds and leaves out."""

    judged: int = 0
    """Rows at which products and attention were judged."""
    left_out: int = 0
    """Rows at which they were not."""
    least_found: int | None = None
    """The largest `RowSample.least_found` of all groups; None if nothing was left out."""


def _borders(sequence: RowSequence) -> Iterator[int]:
    """Yield the first and the last position that each step computed."""
    step = torch.where(sequence.is_judged, sequence.step, -1)
    changes = step.diff(prepend=step.new_tensor([-2]), append=step.new_tensor([-2])) != 0
    is_border = (changes[:-1] | changes[1:]) & sequence.is_judged
    yield from is_border.nonzero()[:, 0].tolist()


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the items, spread evenly over all, beginning with the first."""
    if len(items) <= count:
        return list(items)
    return [items[at * len(items) // count] for at in range(count)]


def rows_standing_out(propagation: Propagation) -> Rows | None:
    """Return all rows that were compared with the golden, those with the largest error for their tap first.

    Errors are divided by the median of their tap: a wrong row stands out in its own tap and in those after it.
    """
    keys, sizes = [], []
    for errors in propagation.errors.values():
        finite = errors.ratio[errors.ratio.isfinite()]
        typical = max(float(finite.median()) if len(finite) else 0.0, torch.finfo(torch.float64).tiny)
        keys.append(errors.rows.keys)
        sizes.append((errors.ratio / typical).nan_to_num(nan=math.inf, posinf=math.inf))
    if not keys:
        return None
    rows, which = torch.cat(keys).unique(return_inverse=True)
    largest = torch.zeros(len(rows), dtype=torch.float64).scatter_reduce(0, which, torch.cat(sizes), "amax")
    rows = rows[largest.argsort(descending=True, stable=True)]
    return Rows(request=rows // REQUEST_KEY, position=rows % REQUEST_KEY, step=torch.full_like(rows, NOWHERE))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRows:
    """The recorded rows of one tap in a batch."""

    places: torch.Tensor
    """[rows] int64: where each row stands, request times tokens, plus token."""
    rows: torch.Tensor
    """[rows, ...] in the dtype they were recorded in."""


_RowsByStep = Sequence[tuple[int, torch.Tensor, torch.Tensor]]
"""For each step: its index, the places of its rows, and the rows."""


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
            positions: [n] int64, ascending: where products and attention are judged; None for all.
            ahead: number of the request's next tokens that layers see after a row's own token, where it has them.
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
        self._located = dict[tuple[bool, tuple[int, ...], str | None], tuple[torch.Tensor, Located | None]]()
        """What `_locate` returns, by the steps that have a tap, and the tap if it covers only some of their rows."""
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
        """[places] bool: where the batch has `ahead` more tokens of the request."""
        ends = torch.tensor(list(map(len, self._tokens)))
        return (torch.arange(self.num_tokens) + num_tokens < ends[:, None]).flatten()

    @property
    def judged_positions(self) -> torch.Tensor | None:
        """[n] int64, ascending: where rows are judged, if others were judged before; None for everywhere."""
        if all(sequence.is_seen is None for sequence in self.sequences):
            return None
        return self.is_own.view(-1, self.num_tokens).any(dim=0).nonzero()[:, 0]

    @property
    def num_sampled(self) -> int:
        """Judged rows at the chosen positions."""
        lines = self.is_own.view(-1, self.num_tokens)
        return int((lines if self.positions is None else lines[:, self.positions]).sum())

    def is_whole(self, tap: str) -> bool:
        """Whether a tap was recorded in every row of every sequence."""
        covered = sum(len(self._covered(index, places, rows, tap)[0]) for index, places, rows in self._by_step)
        return covered == self.num_rows

    @property
    def num_rows(self) -> int:
        """Rows of the batch without padding."""
        return sum(map(len, self.sequences))

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
    def _by_step(self) -> _RowsByStep:
        return self._rows_by_step((self._step >= 0).nonzero()[:, 0])

    @cached_property
    def _judged_by_step(self) -> _RowsByStep:
        return self._rows_by_step(((self._step >= 0) & self.is_own).nonzero()[:, 0])

    def _rows_by_step(self, places: torch.Tensor) -> _RowsByStep:
        """Return for each step: its index, the places of its rows, and the rows."""
        order = self._step[places].argsort(stable=True)
        steps, counts = self._step[places][order].unique_consecutive(return_counts=True)
        by_step = places[order].split(counts.tolist())
        return [(step, at, self._row[at]) for step, at in zip(steps.tolist(), by_step, strict=True)]

    def recorded(self, tap: str, *, is_judged: bool = False) -> RecordedRows | None:
        """Return the rows of a tap that were recorded, or only those to be judged; None if there are none."""
        steps, by_step = self.recording.steps, self._judged_by_step if is_judged else self._by_step
        indices = tuple(index for index, _, _ in by_step if steps[index].has(tap))
        key = is_judged, indices, None if all(steps[index].is_whole(tap) for index in indices) else tap
        if key not in self._located:
            self._located[key] = self._locate(tap, by_step)
        places, located = self._located[key]
        return None if located is None else RecordedRows(places=places, rows=located.rows(tap))

    def _locate(self, tap: str, by_step: _RowsByStep) -> tuple[torch.Tensor, Located | None]:
        """Return places of a tap's rows, [rows], and where these are in the recording; None if there are none."""
        covered = [(index, *self._covered(index, places, rows, tap)) for index, places, rows in by_step]
        parts = [part for part in covered if len(part[1])]
        if not parts:
            return torch.empty(0, dtype=torch.int64), None
        places = torch.cat([places for _, places, _ in parts])
        steps = torch.cat([torch.full_like(places, index) for index, places, _ in parts])
        rows = torch.cat([rows for _, _, rows in parts])
        return places, self.recording.located(steps, rows)

    def _covered(
        self, index: int, places: torch.Tensor, rows: torch.Tensor, tap: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of a step at which a tap was recorded, and where its rows stand among the recorded ones."""
        step = self.recording.steps[index]
        if not step.has(tap):
            return places[:0], rows
        covered = step.rows_of(tap)
        if covered is None:
            return places, rows
        where = torch.full((len(step.request),), NOWHERE, dtype=torch.int64)
        where[covered] = torch.arange(len(covered))
        recorded = where[rows]
        return places[recorded >= 0], recorded[recorded >= 0]


def _tokens(sequence: RowSequence, ahead: int) -> list[int]:
    """Return the tokens of a sequence and the next `ahead`; all of the request's tokens if it has images."""
    tokens = list(sequence.request.token_ids)
    return tokens[: len(sequence) + ahead] if sequence.request.inputs is None else tokens


def _rotary_lengths(recording: Recording) -> dict[int, int]:
    """Return the length that decides the rotary frequencies of each request; empty if that of a forward does."""
    manifest = recording.manifest
    if manifest.numerics is None or not manifest.numerics.rotates_by_request:
        return {}
    lengths = {request.id: len(request.token_ids) for request in manifest.requests}
    return {item.id: lengths[item.id if item.draft_of is None else item.draft_of] for item in manifest.requests}


def _is_judged(recording: Recording, sequence: RowSequence, lengths: Mapping[int, int]) -> torch.Tensor:
    """[tokens] bool: the sequence's own rows, and cached rows of requests of another length: their keys may not fit."""
    if not lengths:
        return sequence.is_judged
    is_judged, length = sequence.is_judged.clone(), lengths[sequence.request.id]
    for position in (sequence.step >= 0).nonzero()[:, 0].tolist():
        writer = int(recording.steps[int(sequence.step[position])].request[sequence.row[position]])
        is_judged[position] |= lengths[writer] != length
    return is_judged


def make_batches(
    recording: Recording,
    sequences: Sequence[RowSequence],
    max_tokens: int,
    sample: PositionSample | None = None,
    *,
    ahead: int = 0,
) -> list[PaddedBatch]:
    """Group sequences of similar lengths so that a batch has at most `max_tokens` tokens, padding included.

    A sequence with images is a batch of its own. A sample chooses the positions of each batch. For `ahead` see
    `PaddedBatch`.
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
