"""The scheduler: it chooses the tokens that the next step computes.

One token budget and no phases: a request is behind by some tokens (its whole prompt at first, one token while it
generates), and each step lets requests catch up, those that are one token behind first. When the blocks run out, the
youngest request gives its own back and starts again later, before all that arrived after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from reference_engine.block_manager import BlockManager
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served, within a budget of tokens, a number of requests and a pool of blocks.

    `before_release` is called with a sequence before its blocks go back to the pool.
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
        """Choose the next step's chunks, single tokens first, and give each the blocks that it needs."""
        chunks, budget, has_preempted = self._schedule_running()
        if self.waiting and not has_preempted:
            budget = self._admit_waiting(chunks, budget)
        if len(chunks) + budget < self._max_num_batched_tokens:  # a request has more than one token
            chunks.sort(key=lambda chunk: chunk.stop - chunk.start > 1)
        return chunks

    def advance(self, chunks: list[ScheduledChunk]) -> None:
        """Record that chunks are computed, and let others find the blocks that have become full."""
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
        self._blocks.publish(chunks)

    def take_back(self, sequence: Sequence) -> None:
        """Free the blocks of a request behind what it has computed, which has become less than it was."""
        if sequence.block_table:
            self._blocks.trim(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Queue a copy of `parent` right after it.

        Where both can run, they share their blocks until one of them writes. Where not, the child waits for its turn
        and is computed from its tokens.
        """
        if parent in self.waiting:
            self.waiting.insert(self.waiting.index(parent) + 1, child)
        elif len(self.running) >= self._max_num_seqs:
            self.waiting.appendleft(child)
        else:
            self._blocks.share(parent, child)
            self.running.insert(self.running.index(parent) + 1, child)

    def finish(self, sequence: Sequence) -> None:
        """Take a running request out and free its blocks."""
        self.running.remove(sequence)
        self._release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Take a request out, running or waiting."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.finish(sequence)

    def _schedule_running(self) -> tuple[list[ScheduledChunk], int, bool]:
        """Return the chunks, what is left of the budget, and whether a request was preempted.

        This is the loop that every step of every request goes through: a request with room in its blocks costs a few
        comparisons. A prompt takes all of the budget that is left, so only the youngest running request, with its
        forks, can be amid its prompt: the order of arrival already puts the single tokens of the others first.
        """
        chunks: list[ScheduledChunk] = []
        budget = self._max_num_batched_tokens
        num_running = len(self.running)
        for sequence in self.running:  # the loop ends early when its tail is preempted
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
        """Add chunks of requests that start to run, and return what is left of the budget."""
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
