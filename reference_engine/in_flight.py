"""Two steps in flight: a decode step is launched before the tokens that it continues are read.

The tokens of a step stay on the device, where the next step takes its own from; the host reads them while the device
computes that one. What the host learns late, that a request has ended, costs a row, which is dropped.

Between two calls of `LLMEngine.step` every request is as in an engine that waits, but that the row in flight has its
block. That row writes behind what is computed, and whoever gets the block later writes after it: so a step in flight
can be dropped at any time and computed again. It is dropped where a request goes back or is suspended, and where an
observer comes, who wants to see it.

A step is waited for, before the next one is launched, where it has an observer, drafts, a chunk within a prompt, a
request of which the host has to do something with each token (`SamplingParams.needs_host`: penalties, stop strings, log
probabilities, forced tokens), where a waiting request may start, or where blocks are missing, so that one is preempted.
Several ranks, recurrent states and attention without a cache always wait.

Shapes: R sampled rows.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.sampler import Sampled

__all__ = ["StepInFlight", "can_be_read_late", "rows_for_tokens"]


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that is launched, and whose tokens are not read."""

    chunks: Seq[ScheduledChunk]
    """One sampled row each."""
    token_ids_R: torch.Tensor
    """int64, on the device."""
    host_R: torch.Tensor
    """int64 on the host: the same once `is_copied` has happened."""
    is_copied: torch.cuda.Event | None
    """None on a CPU, where nothing is in flight."""

    @classmethod
    def of(cls, chunks: Seq[ScheduledChunk], token_ids_R: torch.Tensor) -> StepInFlight:
        """Begin to copy the tokens to the host."""
        host_R = token_ids_R.to("cpu", non_blocking=True)
        is_copied = None
        if token_ids_R.is_cuda:
            is_copied = torch.cuda.Event()
            is_copied.record(torch.cuda.current_stream(token_ids_R.device))
        return cls(chunks, token_ids_R, host_R, is_copied)

    @property
    def live(self) -> list[tuple[int, ScheduledChunk]]:
        """The chunks, with their rows, of requests that have not ended since the step was launched."""
        return [(row, chunk) for row, chunk in enumerate(self.chunks) if chunk.sequence.finish_reason is None]

    @property
    def continued(self) -> list[tuple[int, Sequence]]:
        """The requests, with their rows, that go on after this step, unless its token ends them."""
        requests = [(row, chunk.sequence) for row, chunk in self.live]
        return [(row, item) for row, item in requests if len(item.sampled_token_ids) + 1 < item.params.max_new_tokens]

    def read(self) -> tuple[list[ScheduledChunk], Sampled]:
        """Wait for the tokens of this step alone, and return what is live of it."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        token_ids, live = self.host_R.tolist(), self.live
        return [chunk for _, chunk in live], Sampled([token_ids[row] for row, _ in live], [None] * len(live))


def can_be_read_late(chunks: Iterable[ScheduledChunk]) -> bool:
    """Tell whether the host has nothing to do with the tokens of a step before the next one can be launched."""
    return all(chunk.samples and not chunk.sequence.params.needs_host for chunk in chunks)


@contextmanager
def rows_for_tokens(unread: Seq[tuple[int, Sequence]]) -> Iterator[None]:
    """Let requests have, in place of a token that is not read, the row of the step that it is in."""
    for row, sequence in unread:
        sequence.token_ids.append(row)
        sequence.sampled_token_ids.append(row)
    try:
        yield
    finally:
        for _, sequence in unread:
            del sequence.token_ids[-1], sequence.sampled_token_ids[-1]
