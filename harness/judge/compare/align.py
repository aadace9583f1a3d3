"""The place of each row. Rows of recordings are found by (request, position), never by step or call order.

Rows are also found by content: what a row holds follows from its *prefix*, the tokens up to and including its own,
whichever request computed it. An engine that finds the beginning of a prompt in its cache, or forks a request, does not
compute these rows again; they are those of another request with the same prefix.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo, Step

REQUEST_KEY = 1 << 32
"""What each request adds to the keys of its rows: above every position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Identity of some rows; all int64 tensors of the same length."""

    request: torch.Tensor
    position: torch.Tensor
    step: torch.Tensor

    def __len__(self) -> int:
        return len(self.request)

    def select(self, keep: torch.Tensor) -> "Rows":
        """Return the rows at the given indices, or where the given mask holds."""
        return Rows(request=self.request[keep], position=self.position[keep], step=self.step[keep])

    @property
    def keys(self) -> torch.Tensor:
        """[rows] int64: one number for request and position, by which rows are ordered."""
        return self.request * REQUEST_KEY + self.position

    def places(self) -> list[tuple[int, int]]:
        """Return request and position of each row."""
        return list(zip(self.request.tolist(), self.position.tolist(), strict=True))

    def identities(self) -> list[tuple[int, int, int]]:
        """Return request, position and step of each row."""
        return list(zip(self.request.tolist(), self.position.tolist(), self.step.tolist(), strict=True))

    def first(self, among: torch.Tensor) -> int:
        """Return the index of the smallest (request, position) where the mask `among` holds."""
        candidates = among.nonzero()[:, 0]
        return int(candidates[self.keys[candidates].argmin()])

    @staticmethod
    def concat(parts: Sequence["Rows"]) -> "Rows":
        """Join several into one."""
        if len(parts) == 1:
            return parts[0]
        empty = torch.empty(0, dtype=torch.int64)
        return Rows(
            request=torch.cat([empty, *(part.request for part in parts)]),
            position=torch.cat([empty, *(part.position for part in parts)]),
            step=torch.cat([empty, *(part.step for part in parts)]),
        )


def is_readback(step: Step) -> bool:
    """Whether the step's rows were read back from the KV cache rather than computed."""
    return step.phase == "readback"


def all_rows(step: Step) -> Rows:
    """Return the identity of all rows of one step."""
    request = step.request.long()
    return Rows(request=request, position=step.position.long(), step=torch.full_like(request, step.index))


def step_rows(step: Step, tap: str) -> Rows:
    """Return the identity of the rows of one tap in one step."""
    rows, covered = all_rows(step), step.rows_of(tap)
    return rows if covered is None else rows.select(covered)


def last_index(rows: Rows | Step, request: int, position: int) -> int:
    """Return the index of the last of some rows that is of this request and position; it must be there."""
    return int(((rows.request == request) & (rows.position == position)).nonzero()[-1, 0])


def rows_of_steps(steps: Sequence[Step], tap: str) -> Rows:
    """Return the identity of the rows of one tap in some steps, one after the other."""
    if not all(step.is_whole(tap) for step in steps):
        return Rows.concat([step_rows(step, tap) for step in steps])
    counts = torch.tensor([step.entry.num_rows for step in steps])
    return Rows(
        request=torch.cat([step.request for step in steps]).long(),
        position=torch.cat([step.position for step in steps]).long(),
        step=torch.tensor([step.index for step in steps]).repeat_interleave(counts),
    )


def places_in_steps(steps: Sequence[Step], tap: str) -> torch.Tensor:
    """Return the place in its step of each row of one tap in some steps, one after the other: [rows] int64."""
    counts = torch.tensor([step.num_rows_of(tap) for step in steps])
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


_CHUNK_ROWS = 2048
_CHUNK_BYTES = 64 << 20


def chunks(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Group consecutive steps until they hold enough rows to be compared at once.

    A decode step has a row or two. To measure each step alone would cost a hundred times the arithmetic.
    """
    chunk: list[Step] = []
    rows = num_bytes = 0
    for step in steps:
        chunk.append(step)
        rows, num_bytes = rows + step.entry.num_rows, num_bytes + step.entry.num_bytes
        if rows >= _CHUNK_ROWS or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, rows, num_bytes = [], 0, 0
    if chunk:
        yield chunk


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along rows; a single tensor, which may be a view of a file, is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class Locator:
    """Finds rows of a recording by (request, position). Of a row that was recorded more than once it finds the last."""

    def __init__(self, recording: Recording, aliases: Mapping[int, int] | None = None) -> None:
        """Read nothing yet; a request named in `aliases` is looked up as the one it repeats."""
        self.recording = recording
        self._aliases = aliases or {}
        self._tables: dict[tuple[str, ...], torch.Tensor] = {}

    @cached_property
    def request_ids(self) -> torch.Tensor:
        """The ids of the requests in ascending order; rows of `recorded` follow it."""
        return torch.tensor(sorted(request.id for request in self.recording.manifest.requests), dtype=torch.int64)

    @cached_property
    def _shape(self) -> tuple[int, int]:
        requests = self.recording.manifest.requests
        return len(requests), max((len(request.token_ids) for request in requests), default=0)

    def _dense(self, request: torch.Tensor) -> torch.Tensor:
        """Return the row of each request in the tables: ids may be any integers."""
        return torch.searchsorted(self.request_ids, request)

    def _originals(self, request: torch.Tensor) -> torch.Tensor:
        """Replace the id of each request that repeats another by the id of that request."""
        originals = request
        for alias, original in self._aliases.items():  # an alias may be the id of another original
            originals = torch.where(request == alias, original, originals)
        return originals

    @cached_property
    def _signatures(self) -> dict[str, tuple[str, ...]]:
        """By tap, what is equal for taps that were recorded at exactly the same rows: they share one table."""
        parts: dict[str, list[str]] = {}
        suffixes: dict[int, dict[str, str]] = {}
        for step in self.recording.steps:
            if step.layout not in suffixes:
                suffixes[step.layout] = {tap: "" if step.is_whole(tap) else f":{tap}" for tap in step.tap_names}
            for tap, suffix in suffixes[step.layout].items():
                parts.setdefault(tap, []).append(f"{step.index}{suffix}")
        return {tap: tuple(signature) for tap, signature in parts.items()}

    @cached_property
    def computed(self) -> torch.Tensor:
        """[requests, positions] bool: rows of any step that computed them."""
        computed = torch.zeros(self._shape, dtype=torch.bool)
        for step in self.recording.steps:
            if not is_readback(step):
                computed[self._dense(step.request.long()), step.position.long()] = True
        return computed

    @cached_property
    def ambiguous(self) -> torch.Tensor:
        """[requests, positions] bool: rows that the observer of the engine could not tell from others."""
        ambiguous = torch.zeros(self._shape, dtype=torch.bool)
        for step in self.recording.steps:
            if step.ambiguous is not None:
                request, position = step.request[step.ambiguous], step.position[step.ambiguous]
                ambiguous[self._dense(request.long()), position.long()] = True
        return ambiguous

    def taps(self) -> list[str]:
        """Return the names of all taps of the recording."""
        return list(self._signatures)

    def signature(self, tap: str) -> tuple[str, ...]:
        """Return what is equal for taps that were recorded at exactly the same rows."""
        return self._signatures.get(tap, ())

    def find(self, tap: str, rows: Rows) -> torch.Tensor:
        """Return [rows, 3] int64: step, row within the tap, running number over all steps; -1 where there is none."""
        table, request = self._table(tap), self._originals(rows.request)
        is_known = torch.isin(request, self.request_ids) & (rows.position < table.shape[1])  # a golden has no drafts
        entries = torch.full((len(rows), 3), -1, dtype=torch.int64)
        entries[is_known] = table[self._dense(request[is_known]), rows.position[is_known]]
        return entries

    def _table(self, tap: str) -> torch.Tensor:
        """Return what `find` returns, of every request and position: [requests, positions, 3]."""
        signature = self.signature(tap)
        if signature not in self._tables:
            table, running = torch.full((*self._shape, 3), -1, dtype=torch.int64), 0
            for step in self.recording.steps if signature else ():
                if step.has(tap):
                    rows = step_rows(step, tap)
                    count = torch.arange(len(rows))
                    entries = torch.stack([rows.step, count, running + count], dim=1)
                    table[self._dense(rows.request), rows.position] = entries
                    running += len(rows)
            self._tables[signature] = table
        return self._tables[signature]

    def recorded(self, tap: str) -> torch.Tensor:
        """Return [requests, positions] bool: where the tap was recorded."""
        return self._table(tap)[..., 0] >= 0

    def gather(self, tap: str, entries: torch.Tensor) -> torch.Tensor:
        """Return the rows that `find` found (none of them -1), without copying where they lie side by side."""
        return self.recording.located(entries[:, 0], entries[:, 1]).rows(tap)


def match_requests(expected: Recording, actual: Recording, *, is_pool: bool = False) -> dict[int, int]:
    """Return which request of `expected` each additional request of `actual` repeats, by their ids.

    Every request of `expected` is in `actual` under the same id. Each additional request of `actual` has the same
    tokens, or their beginning: it was sent again, or forked. Of a pool, `actual` holds any of the requests, under any
    ids. Drafts that were rejected are not in `expected`.

    Raises:
        HarnessError: DIFFERENT_PROMPTS: rows of different requests mean different things.
    """
    theirs = {request.id: request for request in expected.manifest.requests}
    ours = {request.id: request for request in actual.manifest.requests}
    where = f"{actual.path} against {expected.path}"
    additional = [
        request for request in ours.values() if request.draft_of is None and (is_pool or request.id not in theirs)
    ]
    aliases = {request.id: _original(request, theirs.values()) for request in additional}
    if not (is_pool or theirs.keys() <= ours.keys()) or None in aliases.values():
        raise HarnessError(
            Code.DIFFERENT_PROMPTS,
            "the recordings hold different requests",
            where=where,
            expected=f"requests {sorted(theirs)}",
            actual=f"requests {sorted(ours)}",
            hint="record both from the same prompts",
        )
    for request_id, request in sorted(theirs.items() if not is_pool else ()):
        _check_same_request(request, ours[request_id], where)
    return {alias: original for alias, original in aliases.items() if original is not None}


def _original(request: RequestInfo, candidates: Iterable[RequestInfo]) -> int | None:
    tokens = list(request.token_ids)
    same = (candidate for candidate in candidates if candidate.inputs == request.inputs)
    return next((candidate.id for candidate in same if list(candidate.token_ids[: len(tokens)]) == tokens), None)


def _check_same_request(expected: RequestInfo, actual: RequestInfo, where: str) -> None:
    pairs = zip(expected.token_ids, actual.token_ids, strict=False)
    differing = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if differing is None and len(expected.token_ids) == len(actual.token_ids) and expected.inputs == actual.inputs:
        return
    if differing is None and expected.inputs != actual.inputs:
        values = (f"inputs {expected.inputs or 'of text alone'}", f"inputs {actual.inputs or 'of text alone'}")
    elif differing is None:
        values = (f"{len(expected.token_ids)} tokens", f"{len(actual.token_ids)} tokens")
    else:
        values = (f"token {expected.token_ids[differing]}", f"token {actual.token_ids[differing]}")
        where += f", position {differing}"
    raise HarnessError(
        Code.DIFFERENT_PROMPTS,
        f"request {expected.id} holds different {'tokens' if expected.inputs == actual.inputs else 'images'}",
        where=where,
        expected=values[0],
        actual=values[1],
        hint="feed the engine the golden's tokens (forced tokens), so that rows align",
    )


class Prefixes:
    """Numbers the distinct token prefixes of some requests, 0 and up."""

    def __init__(self, requests: Sequence[RequestInfo]) -> None:
        ordered = sorted(requests, key=lambda request: request.id)
        self._request_ids = torch.tensor([request.id for request in ordered], dtype=torch.int64)
        length = max((len(request.token_ids) for request in ordered), default=0)
        self.table = torch.full((len(ordered), length), -1, dtype=torch.int64)
        """[requests in ascending order of id, positions] int64: the number of each prefix; -1 past the end."""
        numbers: dict[tuple[int, int], int] = {}
        images = list(dict.fromkeys([None, *(request.inputs for request in ordered)]))
        for row, request in enumerate(ordered):
            parent, chain = -1 - images.index(request.inputs), []
            for token in request.token_ids:
                parent = numbers.setdefault((parent, token), len(numbers))
                chain.append(parent)
            self.table[row, : len(chain)] = torch.tensor(chain, dtype=torch.int64)
        self.count = len(numbers)

    def of(self, rows: Rows) -> torch.Tensor:
        """Return [rows] int64: the number of each row's prefix."""
        return self.table[torch.searchsorted(self._request_ids, rows.request), rows.position]

    def up_to(self, request: int, end: int) -> torch.Tensor:
        """Return [end] int64: the numbers of a request's prefixes at the positions below `end`."""
        return self.table[int(torch.searchsorted(self._request_ids, request)), :end]

    def at(self, request: int, position: int) -> int:
        """Return the number of a request's prefix up to and including a position."""
        return int(self.up_to(request, position + 1)[-1])
