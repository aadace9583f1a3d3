"""Rows that an earlier schedule of the same check had bit for bit, with all rows that they read: judged once.

A row's digest covers what the engine recorded of the row, its token, and the digest of the row before it in its
sequence, so whatever attention reads. Only rows of schedules in which no operation was wrong are remembered. So a wrong
row is judged again in every schedule.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.formats.recording import Recording
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import PaddedBatch
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.sequences import RowSequence, sequences
from harness.oracle.model import HFModel

_ROTATIONS_BY_LENGTH = ("'dynamic'", "'longrope'")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedRows:
    """The rows that a recording is judged at."""

    rows: Rows
    numbers: torch.Tensor
    """[rows] int64, the same for rows of the same content and history."""
    is_seen: torch.Tensor
    """[rows] bool: judged in an earlier schedule."""
    unseen: Sequence[RowSequence]
    """The sequences with other rows, only these to be judged."""


@dataclass(slots=True)
class SeenRows:
    """Errors of the rows that were judged in the schedules so far."""

    num_judged_again: int = 0
    """Of the longest sequences all rows are judged again: the power of a pass is that of the last schedule's rows."""
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _sound: set[int] = field(default_factory=set)
    _errors: dict[str, tuple[LocalErrors, dict[int, int]]] = field(default_factory=dict)
    """By tap: errors, and the place of the row of each number among them."""

    def number(self, recording: Recording, hf: HFModel, taps: Collection[str]) -> NumberedRows | None:
        """Give the rows of a recording their numbers.

        None where a row depends on more than the rows before it: the frequencies of some rotations follow the length of
        a request, some layers see later tokens, and images stand in no row.
        """
        numerics = recording.manifest.numerics
        depends_on_more = any(kind in str(hf.config.to_dict()) for kind in _ROTATIONS_BY_LENGTH) or (
            numerics is not None and numerics.rotates_by_request
        )
        if depends_on_more or hf.graph.drafted_from or any(item.inputs for item in recording.manifest.requests):
            return None
        if not (of_requests := sequences(recording)):
            return None
        by_length = sorted(range(len(of_requests)), key=lambda at: -len(of_requests[at]))
        again = set(by_length[: self.num_judged_again])
        rows, numbers, is_seen, unseen = list[Rows](), list[torch.Tensor](), list[torch.Tensor](), list[RowSequence]()
        for index, item in enumerate(of_requests):
            digests = _digests(recording, item, taps)
            of_all = torch.tensor([self._numbers.setdefault(digest, len(self._numbers)) for digest in digests])
            seen = torch.tensor([number in self._sound and index not in again for number in of_all.tolist()])
            at = item.is_own.nonzero()[:, 0]
            rows.append(Rows(request=torch.full_like(at, item.request.id), position=at, step=item.step[at]))
            numbers.append(of_all[at])
            is_seen.append(seen[at])
            if not bool(is_seen[-1].all()):
                unseen.append(replace(item, is_seen=seen))
        return NumberedRows(
            rows=Rows.concat(rows), numbers=torch.cat(numbers), is_seen=torch.cat(is_seen), unseen=unseen
        )

    def with_seen(self, errors: Mapping[str, LocalErrors], numbered: NumberedRows) -> dict[str, LocalErrors]:
        """Return the errors of all rows: those of seen rows are the ones that were measured before."""
        rows, numbers = numbered.rows.select(numbered.is_seen), numbered.numbers[numbered.is_seen].tolist()
        result = dict(errors)
        for tap, (known, places) in self._errors.items():
            there = torch.tensor([number in places for number in numbers], dtype=torch.bool)
            if bool(there.any()):
                at = torch.tensor([places[number] for number in numbers if number in places])
                of_seen = replace(
                    known, rows=rows.select(there), roundings=known.roundings[at], bound=known.bound[at], control=None
                )
                result[tap] = LocalErrors.concat([of_seen, errors[tap]]) if tap in errors else of_seen
        return result

    def remember(self, errors: Mapping[str, LocalErrors], numbered: NumberedRows) -> None:
        """Note the errors of the unseen rows of a schedule in which no operation was wrong."""
        numbers = dict(zip(numbered.rows.identities(), numbered.numbers.tolist(), strict=True))
        for tap, new in errors.items():
            known, places = self._errors.get(tap, (None, {}))
            begin = 0 if known is None else len(known.roundings)
            for at, identity in enumerate(new.rows.identities(), start=begin):
                places[numbers[identity]] = at
            self._errors[tap] = (new if known is None else LocalErrors.concat([known, new])), places
        self._sound.update(numbered.numbers.tolist())


def _digests(recording: Recording, sequence: RowSequence, taps: Collection[str]) -> list[bytes]:
    """Return the digest of each row of a sequence: of its values, its token, and all rows before it."""
    batch = PaddedBatch(recording, [sequence])
    contents = [hashlib.sha256(b"%d" % token) for token in sequence.token_ids]
    for tap in sorted(taps):
        recorded = batch.recorded(tap)
        if recorded is None:
            continue
        name, values = tap.encode(), recorded.rows.contiguous().view(torch.uint8).flatten(1).numpy()
        for place, row in zip(recorded.places.tolist(), values, strict=True):
            contents[place].update(name)
            contents[place].update(row)
    manifest = recording.manifest
    digests, before = list[bytes](), f"{manifest.dtype} {manifest.device} {manifest.numerics}".encode()
    for content in contents:
        before = hashlib.sha256(before + content.digest()).digest()
        digests.append(before)
    return digests
