"""Recordings that were never written: what the comparison reads of one, made by hand."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch

from harness.recording import RequestInfo

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
        self.request, self.position = torch.tensor(rows, dtype=torch.int32).view(-1, 2).unbind(1)
        self.taps, self._rows_of = dict(taps or {}), dict(rows_of or {})
        self.sampled = None if sampled is None else torch.tensor(sampled)
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

    def rows_of(self, tap: str) -> torch.Tensor | None:
        covered = self._rows_of.get(tap)
        return None if covered is None else torch.tensor(covered)


def recording_of(requests: Mapping[int, Sequence[int]], steps: Sequence[Step], *, prompt_length: int = 1, **manifest):
    """A recording of requests, given as their tokens by id."""
    for index, step in enumerate(steps):
        step.index = index
    infos = [
        RequestInfo(id=id_, token_ids=list(tokens), prompt_length=min(prompt_length, len(tokens)))
        for id_, tokens in requests.items()
    ]
    given = {"dtype": "float32", "numerics": None, "schedule": "by hand"} | manifest
    return SimpleNamespace(path="memory", steps=list(steps), manifest=SimpleNamespace(requests=infos, **given))
