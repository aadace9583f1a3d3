"""Rows that an earlier schedule of the same check had bit for bit, with all rows that they read: judged once.

A row's number stands for what the engine recorded of the row, its token, and the number of the row before it in its
sequence, so whatever attention reads. Only rows of schedules in which no operation was wrong are remembered. So a wrong
row is judged again in every schedule. A distance to the golden depends on the row alone, and is measured once, too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from blake3 import blake3

from harness.formats.recording import Recording, Step
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import spread
from harness.judge.compare.propagated import KnownDistances
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.sequences import NOWHERE, RowSequence, sequences
from harness.judge.compare.systematic import MIN_ROWS
from harness.oracle.model import HFModel

_SEQUENCES_OF_POWER, _LEAST_AGAIN = 2, 8
"""Longest sequences and their rows: the power of a pass on attention is that of so many."""
_GROUP_BYTES = 4 << 20
"""Of taps whose rows are put side by side to be digested: long messages are digested three times as fast."""
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
    contents: Mapping[int, torch.Tensor]
    """By step: [rows] int64, the same for rows of the same content."""
    seen: "SeenRows"

    @property
    def are_few(self) -> bool:
        """Whether too few rows are to be judged for an effect below one rounding, since others were before."""
        return self.num_seen > 0 and not self.seen.num_for_power and int((~self.is_seen).sum()) < MIN_ROWS

    @property
    def num_seen(self) -> int:
        """Number of rows that were judged in an earlier schedule."""
        return int(self.is_seen.sum())


@dataclass(slots=True)
class SeenRows:
    """Errors of the rows that were judged in the schedules so far."""

    num_for_power: int = 0
    """Rows that are judged under the last schedule, some of them again: the power of a pass is that of its rows."""
    _contents: dict[bytes, int] = field(default_factory=dict)
    """By digest of what was recorded of a row."""
    _numbers: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By the number of the row before, the token and the content."""
    _sound: set[int] = field(default_factory=set)
    _errors: dict[str, tuple[LocalErrors, dict[int, int]]] = field(default_factory=dict)
    """By tap: errors, and the place of the row of each number among them."""
    _distances: dict[str, KnownDistances] = field(default_factory=dict)
    """By digest of the golden."""

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
        contents = self._contents_of(recording, taps)
        of_all = [torch.tensor(list(self._chain(item, contents))) for item in of_requests]
        all_seen = [torch.tensor([number in self._sound for number in of_one.tolist()]) for of_one in of_all]
        for index, row in self._judged_again(of_requests, all_seen):
            all_seen[index][row] = False
        rows, numbers, is_seen, unseen = list[Rows](), list[torch.Tensor](), list[torch.Tensor](), list[RowSequence]()
        for item, of_one, seen in zip(of_requests, of_all, all_seen, strict=True):
            at = item.is_own.nonzero()[:, 0]
            rows.append(Rows(request=torch.full_like(at, item.request.id), position=at, step=item.step[at]))
            numbers.append(of_one[at])
            is_seen.append(seen[at])
            if not bool(is_seen[-1].all()):
                unseen.append(replace(item, is_seen=seen))
        return NumberedRows(
            rows=Rows.concat(rows),
            numbers=torch.cat(numbers),
            is_seen=torch.cat(is_seen),
            unseen=unseen,
            contents={step: torch.tensor(of_step) for step, of_step in contents.items()},
            seen=self,
        )

    def _judged_again(self, of_requests: Sequence[RowSequence], seen: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Return rows of the longest sequences that are judged again, by sequence and position, the last first."""
        if not self.num_for_power:
            return []
        rows = [item.is_own & is_seen for item, is_seen in zip(of_requests, seen, strict=True)]
        num_unseen = sum(int(item.is_own.sum()) for item in of_requests) - sum(int(of_one.sum()) for of_one in rows)
        longest = sorted(range(len(rows)), key=lambda at: -len(rows[at]))[:_SEQUENCES_OF_POWER]
        usable = [(at, row) for at in longest for row in rows[at].nonzero()[:, 0].flip(0).tolist()]
        num_again = max(_LEAST_AGAIN, self.num_for_power - num_unseen)
        return [usable[at] for at in spread(range(len(usable)), num_again)]

    def _contents_of(self, recording: Recording, taps: Collection[str]) -> dict[int, list[int]]:
        """Return the number of each row's content, by step."""
        manifest = recording.manifest
        before = blake3(f"{manifest.dtype} {manifest.device} {manifest.numerics}".encode()).digest()
        contents = dict[int, list[int]]()
        for steps in _side_by_side(recording.steps):
            digests = [digest.digest() for digest in _digests(steps, sorted(taps), before)]
            numbers = [self._contents.setdefault(digest, len(self._contents)) for digest in digests]
            num_rows = steps[0].entry.num_rows
            contents |= {step.index: numbers[at * num_rows : (at + 1) * num_rows] for at, step in enumerate(steps)}
        return contents

    def _chain(self, sequence: RowSequence, contents: Mapping[int, Sequence[int]]) -> Iterator[int]:
        """Yield the number of each row of a sequence."""
        before = NOWHERE
        for token, step, row in zip(sequence.token_ids, sequence.step.tolist(), sequence.row.tolist(), strict=True):
            content = NOWHERE if step == NOWHERE else contents[step][row]
            before = self._numbers.setdefault((before, token, content), len(self._numbers))
            yield before

    def distances(self, golden: Recording) -> KnownDistances:
        """Return the distances to a golden that are known, to be added to."""
        return self._distances.setdefault(golden.manifest_sha256, KnownDistances())

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


def _side_by_side(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Yield the steps that are kept side by side together, and all others alone."""
    kept = dict[int, list[Step]]()
    for step in steps:
        if step.kept is None:
            yield [step]
        else:
            kept.setdefault(id(step.kept), []).append(step)
    yield from kept.values()


def _digests(steps: Sequence[Step], taps: Sequence[str], before: bytes) -> list[blake3]:
    """Return the digest of what was recorded of each row of some steps that are alike, one step after the other."""
    first, num_rows = steps[0], steps[0].entry.num_rows * len(steps)
    digests, names = [blake3(before) for _ in range(num_rows)], [list[str]() for _ in range(num_rows)]
    for group in _groups(first, list(filter(first.has, taps))):
        tensors = [first.beside(tap)[0].contiguous() for tap in group]
        parts = [tensor.view(torch.uint8).flatten(1) for tensor in tensors]
        told = [f"{tap} {tensor.dtype}" for tap, tensor in zip(group, tensors, strict=True)]
        for at, row in zip(_covered(steps, group[0]), torch.cat(parts, dim=1).numpy(), strict=True):
            digests[at].update(row)
            names[at] += told
    for digest, of_row in zip(digests, names, strict=True):
        digest.update("\n".join(of_row).encode())
    return digests


def _groups(step: Step, taps: Sequence[str]) -> Iterator[Sequence[str]]:
    """Group taps that cover all rows of a step, up to some bytes; each other stands alone."""
    group, num_bytes = list[str](), 0
    for tap in taps:
        if group and (num_bytes >= _GROUP_BYTES or not step.is_whole(tap) or not step.is_whole(group[-1])):
            yield group
            group, num_bytes = [], 0
        group.append(tap)
        num_bytes += step.num_bytes_of(tap)
    if group:
        yield group


def _covered(steps: Sequence[Step], tap: str) -> Iterator[int]:
    """Yield which rows of some steps a tap covers, of all rows of these steps."""
    for at, step in enumerate(steps):
        rows, begin = step.rows_of(tap), at * step.entry.num_rows
        yield from (begin + row for row in (range(step.entry.num_rows) if rows is None else rows.tolist()))
