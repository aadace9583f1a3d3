"""Recordings in memory: taken from the disk, changed by a test, written again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness.base.numerics import Numerics
from harness.formats.recording import Manifest, Recording, RecordingWriter, RequestInfo, RunInfo


@dataclass
class Step:
    """One step; every field may be changed before it is written."""

    phase: str
    request: list[int]
    position: list[int]
    sampled: list[int] | None
    taps: dict[str, torch.Tensor]
    rows_of: dict[str, list[int]] = field(default_factory=dict)
    block_tables: dict[int, list[int]] | None = None
    slot_mapping: list[int] | None = None

    def select(self, rows: Sequence[int]) -> "Step":
        """Return a step of some of the rows, in the order given."""
        rows_of, taps = {}, {}
        for name, tensor in self.taps.items():
            covered = self.rows_of.get(name)
            if covered is None:
                taps[name] = tensor[list(rows)]
                continue
            kept = [(new, covered.index(row)) for new, row in enumerate(rows) if row in covered]
            if kept:
                rows_of[name] = [new for new, _ in kept]
                taps[name] = tensor[[old for _, old in kept]]
        return Step(
            phase=self.phase,
            request=[self.request[row] for row in rows],
            position=[self.position[row] for row in rows],
            sampled=None if self.sampled is None else [self.sampled[row] for row in rows],
            taps=taps,
            rows_of=rows_of,
            block_tables=self.block_tables,
            slot_mapping=None if self.slot_mapping is None else [self.slot_mapping[row] for row in rows],
        )

    def row(self, request: int, position: int) -> int | None:
        """Return the row of that request and position."""
        rows = zip(self.request, self.position, strict=True)
        return next((row for row, at in enumerate(rows) if at == (request, position)), None)


@dataclass
class Copy:
    """A recording in memory."""

    manifest: Manifest
    requests: list[RequestInfo]
    steps: list[Step]
    dtype: str
    numerics: Numerics | None = None

    @classmethod
    def of(cls, recording: Recording) -> "Copy":
        """Copy all of a recording."""
        steps = [
            Step(
                phase=step.phase,
                request=step.request.tolist(),
                position=step.position.tolist(),
                sampled=None if step.sampled is None else step.sampled.tolist(),
                taps={name: step.tap(name).clone() for name in step.tap_names},
                rows_of={name: rows.tolist() for name in step.tap_names if (rows := step.rows_of(name)) is not None},
                block_tables=dict(step.block_tables) if step.block_tables else None,
                slot_mapping=None if step.slot_mapping is None else step.slot_mapping.tolist(),
            )
            for step in recording.steps
        ]
        return cls(recording.manifest, list(recording.manifest.requests), steps, recording.manifest.dtype)

    def write(self, path: Path) -> Recording:
        """Write it and open it."""
        writer = RecordingWriter(
            path,
            RunInfo(
                producer=self.manifest.producer,
                model=self.manifest.model,
                dtype=self.dtype,
                device="cpu",
                schedule=self.manifest.schedule,
                numerics=self.numerics,
            ),
            self.requests,
        )
        with writer:
            for step in self.steps:
                _write(writer, step)
        return Recording.open(path)

    def at(self, tap: str, request: int, position: int) -> torch.Tensor:
        """Return a view of one row of a tap, to be changed in place, where it was computed last."""
        actual = None
        for step in self.steps:
            row = step.row(request, position)
            if row is None or tap not in step.taps:
                continue
            rows = step.rows_of.get(tap)
            if rows is None or row in rows:
                actual = step.taps[tap][row if rows is None else rows.index(row)]
        assert actual is not None, (tap, request, position)
        return actual

    def drop(self, tap: str) -> None:
        """Leave a tap out everywhere."""
        for step in self.steps:
            step.taps.pop(tap, None)
            step.rows_of.pop(tap, None)

    def computing(self) -> Iterable[Step]:
        """Return the steps that are not read back."""
        return [step for step in self.steps if step.phase != "readback"]


def _write(writer: RecordingWriter, step: Step) -> None:
    sampled = [] if step.sampled is None else [row for row, token in enumerate(step.sampled) if token >= 0]
    writer.begin_step(
        phase=step.phase,
        request=step.request,
        position=step.position,
        sampled_rows=sampled,
        partial_rows=step.rows_of or None,
        block_tables=step.block_tables,
        slot_mapping=step.slot_mapping,
    )
    for name, tensor in step.taps.items():
        writer.tap(name, tensor)
    writer.end_step([step.sampled[row] for row in sampled] if step.sampled is not None else ())
