"""The interface of an observer of the engine: a tiny Protocol, so that observers need not be imported here.

Shapes: T rows (tokens) of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Observer", "StepInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A description of the rows of one step."""

    phase: str
    """`prefill`, `decode`, `mixed`, or `readback` (the cache's content before its blocks are freed)."""
    request_ids: Sequence[int]
    """[T] request of each row."""
    positions: Sequence[int]
    """[T] position of each row in its request."""
    sampled_rows: Sequence[int]
    """Indices into the T rows whose logits are computed; empty on readback."""
    slot_mapping: Sequence[int]
    """[T] physical slot of each row; empty when the backend has no blocks."""
    block_tables: Mapping[int, Sequence[int]]
    """Physical blocks of each request; empty likewise."""


class Observer(Protocol):
    """Receives every intermediate of every step."""

    def begin_step(self, step: StepInfo) -> None:
        """Announce the rows of the taps that follow."""

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        """Show one intermediate, [rows, ...] in the engine's own dtype: copy it to keep it, never change it."""

    def end_step(self, sampled: Sequence[int]) -> None:
        """Close the step with the engine's own choice per sampled row, in the order of `sampled_rows`."""
