"""The scheduler: chooses the tokens that the next step computes.

There is one token budget, without separate phases. A request is some tokens behind: its whole prompt at first, one
token in decode. Each step lets requests catch up; those that are one token behind come first. If there are no free
blocks, the scheduler preempts the youngest request, which later starts again before all that arrived after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from reference_engine.block_manager import BlockManager
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """First-come-first-served scheduler with limits on tokens per step, running requests and KV blocks.

    `before_release` is called with a sequence before its blocks return to the pool.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        before_release: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._before_release = before_release
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request that fits the pool."""
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the chunks of the next step, single tokens first, and allocate their blocks."""
        chunks, budget, has_preempted = self._schedule_running()
        if self.waiting and not has_preempted:
            budget = self._admit_waiting(chunks, budget)
        if len(chunks) + budget < self._max_num_batched_tokens:  # a request has more than one token
            chunks.sort(key=lambda chunk: chunk.stop - chunk.start > 1)
        return chunks

    def schedule_next(self, sequences: Seq[Sequence]) -> list[ScheduledChunk] | None:
        """Choose the last token of each of these running requests; None where a block is missing."""
        chunks = [ScheduledChunk(sequence, sequence.num_tokens - 1, sequence.num_tokens) for sequence in sequences]
        for sequence, stop in ((chunk.sequence, chunk.stop) for chunk in chunks):
            if stop > sequence.num_writable_tokens and not self._blocks.grow(sequence, stop):
                return None
        return chunks

    def admits_none(self, num_sequences: int) -> bool:
        """Tell whether so many requests are all that the next step can have, whichever of them end before it."""
        is_full = len(self.running) >= self._max_num_seqs
        return num_sequences == len(self.running) and (is_full or not self.waiting)

    def advance(self, chunks: list[ScheduledChunk]) -> None:
        """Record that chunks are computed, and publish full blocks to the prefix cache."""
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
        self._blocks.publish(chunks)

    def take_back(self, sequence: Sequence) -> None:
        """Free the blocks after the computed tokens of a request, whose number has decreased."""
        if sequence.block_table:
            self._blocks.trim(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Queue a copy of `parent` right after it.

        If both can run, they share their blocks until one of them writes. Otherwise the child waits, and is computed
        from its tokens.
        """
        if parent in self.waiting:
            self.waiting.insert(self.waiting.index(parent) + 1, child)
        elif len(self.running) >= self._max_num_seqs:
            self.waiting.appendleft(child)
        else:
            self._blocks.share(parent, child)
            self.running.insert(self.running.index(parent) + 1, child)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running request and free its blocks."""
        self.running.remove(sequence)
        self._release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Remove a running or waiting request."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.finish(sequence)

    def _schedule_running(self) -> tuple[list[ScheduledChunk], int, bool]:
        """Return the chunks, the remaining budget, and whether a request was preempted.

        This loop runs for every request in every step, so a request with room in its blocks costs only a few
        comparisons. A prompt takes all of the remaining budget, so only the youngest running request (and its forks)
        can be in the middle of its prompt. In order of arrival, the single tokens of the others therefore come first.
        """
        chunks: list[ScheduledChunk] = []
        budget = self._max_num_batched_tokens
        num_running = len(self.running)
        for sequence in self.running:  # preemption shortens the list, so the loop ends early
            if budget == 0:
                break
            start, stop = sequence.num_computed_tokens, len(sequence.token_ids)
            if stop - start > budget:
                stop = start + budget
            while stop > sequence.num_writable_tokens and not self._blocks.grow(sequence, stop):
                if self._preempt_youngest() is sequence:
                    return chunks, budget, True
            chunks.append(ScheduledChunk(sequence, start, stop))
            budget -= stop - start
        return chunks, budget, len(self.running) < num_running

    def _admit_waiting(self, chunks: list[ScheduledChunk], budget: int) -> int:
        """Add chunks of requests that start to run, and return the remaining budget."""
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            start = self._blocks.take_prefix(sequence)
            stop = min(sequence.num_tokens, start + budget)
            if not self._blocks.grow(sequence, stop):
                self._blocks.release(sequence)
                break
            self.running.append(self.waiting.popleft())
            chunks.append(ScheduledChunk(sequence, start, stop))
            budget -= stop - start
        return budget

    def _preempt_youngest(self) -> Sequence:
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        try:
            self._before_release(sequence)
        finally:
            self._blocks.release(sequence)
