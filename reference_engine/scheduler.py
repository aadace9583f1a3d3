"""Which tokens are computed in the next step.

One token budget and no phases: a request is behind by some tokens (its whole prompt at first, one token while it
generates), and each step lets requests catch up, those that are one token behind first. When the blocks run out, the
youngest request gives its own back and starts again later, before all that arrived after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from reference_engine.block_pool import BlockPool
from reference_engine.sequence import Chunk, Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served, within a budget of tokens, a number of requests and a pool of blocks.

    `before_release` is called with a sequence before its blocks go back to the pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        before_release: Callable[[Sequence], None],
    ) -> None:
        self._pool = pool
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

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks, single tokens first, and give each the blocks that it needs."""
        num_scheduled, has_preempted = self._schedule_running()
        if not has_preempted:
            self._admit_waiting(num_scheduled)
        chunks = [
            Chunk(sequence=s, start=s.num_computed_tokens, stop=s.num_computed_tokens + n)
            for s, n in num_scheduled.items()
        ]
        return sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)

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

    def _schedule_running(self) -> tuple[dict[Sequence, int], bool]:
        # A prompt takes all of the budget that is left, so only the youngest running request can be amid its prompt:
        # the order of arrival already puts the single tokens of the others first.
        num_scheduled: dict[Sequence, int] = {}
        budget = self._max_num_batched_tokens
        has_preempted = False
        while len(num_scheduled) < len(self.running) and budget > 0:
            sequence = self.running[len(num_scheduled)]
            num_tokens = min(sequence.num_remaining_tokens, budget)
            if self._grow(sequence, num_tokens):
                num_scheduled[sequence] = num_tokens
                budget -= num_tokens
            else:
                self._preempt_youngest()
                has_preempted = True
        return num_scheduled, has_preempted

    def _admit_waiting(self, num_scheduled: dict[Sequence, int]) -> None:
        budget = self._max_num_batched_tokens - sum(num_scheduled.values())
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = min(sequence.num_remaining_tokens, budget)
            if not self._grow(sequence, num_tokens):
                break
            self.running.append(self.waiting.popleft())
            num_scheduled[sequence] = num_tokens
            budget -= num_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let the block table hold `num_tokens` more, if the pool can."""
        num_needed = self._pool.num_needed(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        if num_needed > 0:
            if not self._pool.can_allocate(num_needed):
                return False
            sequence.block_table.extend(self._pool.allocate(num_needed))
        return True

    def _preempt_youngest(self) -> None:
        sequence = self.running.pop()
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        try:
            self._before_release(sequence)
        finally:
            self._pool.free(sequence.block_table)
            sequence.reset()
