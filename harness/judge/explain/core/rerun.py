"""The part of HF's model with an operation, run again over all of a batch, with something else in it.

What the engine recorded is put back, as where it was judged, so that everything that it did not record follows from
HF's own code: a change is tried through all that lies between it and the next tap.

`P` places of the batch, `R` rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from harness.formats.taps import Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import RecordedRows
from harness.judge.compare.evidence import Scene
from harness.judge.compare.replay import put_back
from harness.oracle.model import HFModel
from harness.oracle.paired import Value, run_part
from harness.oracle.watch import AttentionCall, Watch


class _SeenError(Exception):
    """Ends a run where the operation was seen."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A part of the model, held in float64, and the operation in it that is looked at."""

    hf: HFModel
    watch: Watch
    scene: Scene
    operation: Operation
    usable: frozenset[str]
    """Recorded taps."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """[P, ...] of each tap of the part, as the latest run went on with it."""
    recorded: dict[str, RecordedRows | None] = field(default_factory=dict)
    """Of each tap of the part, what the engine recorded in the batch."""
    calls: dict[str, AttentionCall] = field(default_factory=dict)
    """Of each attention of the part, by its tap."""

    @cached_property
    def _where(self) -> Mapping[tuple[int, int, int], int]:
        everything = torch.arange(self.scene.batch.num_places)
        return {row: place for place, row in enumerate(self.scene.batch.rows(everything).identities())}

    def places(self, rows: Rows) -> torch.Tensor:
        """Return where rows stand in the batch, [R] int64; -1 for those that stand in another."""
        return torch.tensor([self._where.get(row, -1) for row in rows.identities()], dtype=torch.int64)

    def run(self, given: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None) -> torch.Tensor:
        """Return what the operation gives in all places, [P, W] float64.

        Args:
            given: by tap, places [R] and rows [R, ...] to put there in the place of what HF computes.
        """
        self.values.clear()
        with suppress(_SeenError):
            run_part(
                self.hf,
                self.watch,
                self.scene.call,
                (len(self.scene.batch.sequences), self.scene.batch.num_tokens),
                lambda value: self._show(value, given or {}),
            )
        return self.values[self.operation.tap].flatten(1).to("cpu", torch.float64)

    def _recorded(self, tap: str) -> RecordedRows | None:
        if tap not in self.recorded:
            self.recorded[tap] = self.scene.batch.recorded(tap) if tap in self.usable else None
        return self.recorded[tap]

    def _show(self, value: Value, given: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
        tap, replaced = value.operation.tap, None
        rows = value.in_all_places(value.rows, self.scene.batch.num_places)
        if value.call is not None:
            self.calls[tap] = value.call
        if tap == self.operation.tap:
            self.values[tap] = rows.clone()
            raise _SeenError
        if tap in given:
            replaced = put_back(rows, *given[tap])
        elif (recorded := self._recorded(tap)) is not None:
            replaced = put_back(rows, recorded.places, recorded.rows)
        self.values[tap] = (rows if replaced is None else replaced).clone()
        return replaced if replaced is None or value.places is None else replaced[value.places.to(replaced.device)]


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a parameter another attribute for the duration of the block."""
    own = getattr(holder, name)
    try:
        setattr(holder, name, value)
        yield
    finally:
        setattr(holder, name, own)
