"""Recordings that were never written: what the comparison reads of one, made by hand."""

from collections.abc import Mapping, Sequence
from types import MethodType, SimpleNamespace

import torch

from harness.formats.recording import Recording, RequestInfo
from harness.formats.taps import Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import RecordedRows
from harness.judge.compare.replay import TapRows
from harness.oracle.paired import Value
from harness.oracle.watch import AttentionCall

Row = tuple[int, int]
"""Request and position."""


class Step:
    """One step; taps are [rows, ...], of all rows or of those in `rows_of`."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        phase: str = "prefill",
        taps: Mapping[str, torch.Tensor] | None = None,
        rows_of: Mapping[str, Sequence[int]] | None = None,
        sampled: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        tables: Mapping[int, list[int]] | None = None,
        num_bytes: int = 0,
    ) -> None:
        self.index, self.phase = -1, phase
        self.request, self.position = (torch.tensor([row[at] for row in rows], dtype=torch.int32) for at in range(2))
        self.taps, self._rows_of = dict(taps or {}), dict(rows_of or {})
        self.sampled = None if sampled is None else torch.tensor(sampled)
        self.ambiguous = None
        self.slot_mapping = None if slots is None else torch.tensor(slots)
        self.block_tables = tables
        self.entry = SimpleNamespace(num_rows=len(rows), num_bytes=num_bytes)

    @property
    def tap_names(self) -> list[str]:
        return list(self.taps)

    def has(self, tap: str) -> bool:
        return tap in self.taps

    def tap(self, tap: str) -> torch.Tensor:
        return self.taps[tap]

    def beside(self, tap: str) -> tuple[torch.Tensor, int]:
        return self.taps[tap], 0

    @property
    def layout(self) -> int:
        return id(self)

    def is_whole(self, tap: str) -> bool:
        return tap not in self._rows_of

    def num_rows_of(self, tap: str) -> int:
        return len(self.taps[tap])

    def rows_of(self, tap: str) -> torch.Tensor | None:
        covered = self._rows_of.get(tap)
        return None if covered is None else torch.tensor(covered, dtype=torch.int64)


def recording_of(requests: Mapping[int, Sequence[int]], steps: Sequence[Step], *, prompt_length: int = 1, **manifest):
    """A recording of requests, given as their tokens by id."""
    for index, step in enumerate(steps):
        step.index = index
    infos = [
        RequestInfo(id=id_, token_ids=list(tokens), prompt_length=min(prompt_length, len(tokens)))
        for id_, tokens in requests.items()
    ]
    fields = {"dtype": "float32", "numerics": None, "schedule": "by hand"} | manifest
    shapes = {name: tuple(rows.shape[1:]) for step in steps for name, rows in step.taps.items()}
    taps = [SimpleNamespace(name=name, shape=shape) for name, shape in shapes.items()]

    made = SimpleNamespace(
        path="memory",
        taps=taps,
        steps=list(steps),
        manifest=SimpleNamespace(requests=infos, **fields),
        _groups=torch.arange(len(steps)),
        _places=torch.zeros(len(steps), dtype=torch.int64),
    )
    made.located = MethodType(Recording.located, made)
    return made


def tap_rows(
    operation: Operation,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    control: torch.Tensor | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    places: Sequence[int] | None = None,
    recorded: Mapping[str, RecordedRows] | None = None,
    num_tokens: int = 100,
    num_places: int = 200,
    call: AttentionCall | None = None,
    scores: torch.Tensor | None = None,
    unrecorded: tuple[str, ...] = (),
) -> TapRows:
    """Rows of one operation that are to be judged; requests have so many tokens, and are numbered as in the batch."""
    at = torch.arange(len(actual)) if places is None else torch.tensor(places)

    def identity(places: torch.Tensor) -> Rows:
        return Rows(request=places // num_tokens, position=places % num_tokens, step=torch.zeros_like(places))

    batch = SimpleNamespace(
        num_tokens=num_tokens,
        num_places=num_places,
        rows=identity,
        recorded=(recorded or {}).get,
        token_ids=torch.arange(num_places).view(-1, num_tokens),
    )
    return TapRows(
        operation=operation,
        unrecorded=unrecorded,
        batch=batch,
        places=at,
        actual=actual,
        expected=expected,
        control=control,
        control_scores=None,
        values={tap: rows.__getitem__ for tap, rows in (inputs or {}).items()},
        value=Value(operation=operation, rows=expected, call=call, scores=scores),
    )
