"""The KV cache as the engine's own slot mappings and block tables describe it: who wrote each slot, and what is read.

Nothing here is guessed: it is what the engine recorded. Where attention follows from it, attention itself is right and
the cache's content is what is wrong.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.formats.recording import Recording
from harness.judge.compare.align import is_readback

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
        """Who wrote each slot, in the order of the steps."""
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
        """Whether the engine said where it wrote and what its tables were."""
        return bool(self._writes) and self.block_size is not None

    @cached_property
    def block_size(self) -> int | None:
        """Tokens in a block: the size under which most rows were written where their block table says."""
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
        """Return the first entries, those of whole steps."""
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
        """Return the block table of a request in a step; empty if the engine did not say."""
        if step not in self._tables:
            self._tables[step] = self.recording.steps[step].block_tables or {}
        return self._tables[step].get(request, [])

    def slots(self, table: Sequence[int], count: int) -> list[int]:
        """Return the slots that a block table gives the first `count` positions, as far as it reaches."""
        size = self.block_size or 1
        return [block * size + offset for block in table for offset in range(size)][:count]

    def writer(self, slot: int, step: int) -> Write | None:
        """Return who wrote a slot last, up to and including a step."""
        writes = self._writes.get(slot, [])
        end = bisect_right(writes, step, key=lambda write: write.step)
        return writes[end - 1] if end else None

    def written_slots(self, step: int) -> list[int]:
        """Return the slots that were written by the end of a step."""
        return [slot for slot, writes in self._writes.items() if writes[0].step <= step]

    def misplaced(self, step: int) -> list[tuple[int, int, int, int]]:
        """Return (request, position, slot written, slot by the block table) of rows that were written elsewhere."""
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
