"""A scheduler in the manner of vLLM: steps are planned ahead of their results, and draft tokens are verified.

It is written for these tests. The subclasses have bugs of the kind that such schedulers had.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..blocks.chained import ChainedManager

UNKNOWN = -1
"""A token that is in flight."""


@dataclass(slots=True, eq=False)
class Job:
    request_id: int
    token_ids: list[int]
    num_total: int
    num_planned: int = 0
    """Positions that are computed, or in flight."""
    num_pending: int = 0
    """Tokens that are in flight."""
    num_slots: int = 0
    num_lives: int = 0
    """How often it was preempted."""
    drafts: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending


@dataclass(slots=True, eq=False)
class Planned:
    """One request's part of a step."""

    job: Job
    start: int
    stop: int
    num_lives: int
    num_extra: int


class AheadScheduler:
    """Plans the next step while one is in flight."""

    max_steps_in_flight = 2
    max_draft_tokens = 0
    max_tokens_per_step = 1
    reuses_prefixes = True

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.blocks = ChainedManager(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.budget, self.max_num_seqs, self.max_model_len = max_num_batched_tokens, max_num_seqs, max_model_len
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self.in_flight: list[list[Planned]] = []

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        num_total, limit = len(token_ids) + max_new_tokens, min(self.max_model_len, self.num_blocks * self.block_size)
        if num_total > limit:
            raise ValueError(f"the request has {num_total} tokens, and at most {limit} fit")
        self.waiting.append(Job(request_id, list(token_ids), num_total))

    def schedule(self) -> list[tuple[int, int, int]]:
        step, budget, num_active = [], self.budget, len(self.active)
        for job in list(self.active):
            if budget > 0 and job in self.active:
                budget = self._plan(step, job, budget)
        has_preempted = len(self.active) < num_active
        while self.waiting and not has_preempted and budget > 0 and len(self.active) < self.max_num_seqs:
            job = self.waiting[0]
            num_cached = self.blocks.allocate(job.request_id, job.token_ids)
            if num_cached is None:
                break
            job.num_planned, job.num_slots = num_cached, len(job.token_ids)
            self.active.append(self.waiting.popleft())
            budget = self._plan(step, job, budget)
        self.in_flight.append(step)
        return [(planned.job.request_id, planned.start, planned.stop) for planned in step]

    def update(self, sampled: Mapping[int, object]) -> list[int]:
        """Return the requests whose tokens are dropped: they were preempted meanwhile."""
        dropped = []
        for planned in self.in_flight.pop(0):
            job, tokens = planned.job, _listed(sampled.get(planned.job.request_id))
            if job.num_lives == planned.num_lives and job in self.active:
                self._advance(planned, tokens)
            elif tokens and job in self.waiting:
                dropped.append(job.request_id)
        return dropped

    def finish(self, request_id: int) -> None:
        self._release(self._active(request_id))

    def abort(self, request_id: int) -> None:
        job = next((job for job in self.waiting if job.request_id == request_id), None)
        if job is not None:
            self.waiting.remove(job)
        else:
            self._release(self._active(request_id))

    def running(self) -> list[int]:
        return [job.request_id for job in self.active]

    def block_table(self, request_id: int) -> list[int]:
        return self.blocks.block_table(request_id)

    def num_free(self) -> int:
        return self.blocks.num_free()

    def free_list(self) -> list[int]:
        return self.blocks.free_list()

    def cached_blocks(self) -> dict[int, tuple[int, ...]]:
        return self.blocks.cached_blocks()

    def _active(self, request_id: int) -> Job:
        return next(job for job in self.active if job.request_id == request_id)

    def _plan(self, step: list[Planned], job: Job, budget: int) -> int:
        start, stop = job.num_planned, min(job.num_tokens, job.num_planned + budget)
        if stop <= start or self._is_complete(job):
            return budget
        num_extra = self._num_extra(job, budget - (stop - start)) if stop == job.num_tokens else 0
        if not self._grow(job, stop + num_extra):
            num_extra = 0
            while not self._grow(job, stop):
                victim = self.active[-1]
                self._preempt(victim, step)
                if victim is job:
                    return budget
        step.append(Planned(job, start, stop + num_extra, job.num_lives, num_extra))
        self._note_planned(job, stop + num_extra)
        if stop == job.num_tokens:
            job.num_pending += 1
        return budget - (stop + num_extra - start)

    def _note_planned(self, job: Job, stop: int) -> None:
        job.num_planned = stop

    def _is_complete(self, job: Job) -> bool:
        return job.num_tokens >= job.num_total

    def _num_extra(self, job: Job, budget: int) -> int:
        """Return how many slots after its tokens a request may use in this step."""
        if job.num_pending:
            return 0
        wanted = len(job.drafts) + (self.max_tokens_per_step - 1) * (len(job.token_ids) > job.num_planned)
        return max(0, min(wanted, budget, self._longest() - job.num_tokens))

    def _longest(self) -> int:
        return self.max_model_len

    def _grow(self, job: Job, num_slots: int) -> bool:
        while job.num_slots < num_slots:
            if not self.blocks.append(job.request_id, UNKNOWN):
                return False
            job.num_slots += 1
        return True

    def _preempt(self, job: Job, step: list[Planned]) -> None:
        step[:] = [planned for planned in step if planned.job is not job]
        self.blocks.free(job.request_id)
        self.active.remove(job)
        job.num_planned = job.num_slots = 0
        job.num_lives += 1
        self._forget_pending(job)
        self.waiting.appendleft(job)

    def _forget_pending(self, job: Job) -> None:
        job.num_pending, job.drafts = 0, []

    def _advance(self, planned: Planned, tokens: Sequence[int]) -> None:
        job = planned.job
        num_rejected = planned.num_extra - (len(tokens) - 1) if tokens else 0
        if tokens:
            job.num_pending -= 1
            job.token_ids += tokens
        held = self.blocks.held[job.request_id]
        held.token_ids[: len(job.token_ids)] = job.token_ids[: len(held.token_ids)]
        self._publish(planned, num_rejected)
        self._take_back(job, planned, num_rejected)
        job.drafts = []

    def _publish(self, planned: Planned, num_rejected: int) -> None:
        self.blocks.computed(planned.job.request_id, planned.stop - num_rejected)

    def _take_back(self, job: Job, planned: Planned, num_rejected: int) -> None:
        if num_rejected > 0:
            job.num_planned = planned.stop - num_rejected

    def _release(self, job: Job) -> None:
        self.active.remove(job)
        self.blocks.free(job.request_id)


def _listed(tokens: object) -> list[int]:
    if tokens is None:
        return []
    return list(tokens) if isinstance(tokens, list) else [tokens]  # type: ignore[list-item]


class FreedTwice(AheadScheduler):
    """A request that has ended frees its blocks again when its step in flight is reported."""

    def _release(self, job: Job) -> None:
        self.ended = (job, self.blocks.held[job.request_id].blocks)
        super()._release(job)

    def update(self, sampled: Mapping[int, object]) -> list[int]:
        job, blocks = getattr(self, "ended", (None, []))
        if any(planned.job is job for planned in self.in_flight[0]):
            self.blocks.free_blocks.extend(blocks)
        return super().update(sampled)


class AbortedInFlightLeaks(AheadScheduler):
    """An abort waits for the step in flight, which nobody looks at again."""

    def abort(self, request_id: int) -> None:
        if any(planned.job.request_id == request_id for step in self.in_flight for planned in step):
            self.active = [job for job in self.active if job.request_id != request_id]
        else:
            super().abort(request_id)


class TokenLost(AheadScheduler):
    """The token of a request that was preempted in flight is dropped without a word."""

    def update(self, sampled: Mapping[int, object]) -> list[int]:
        super().update(sampled)
        return []


class PendingKept(AheadScheduler):
    """A preempted request comes back with a token that is no longer in flight."""

    def _forget_pending(self, job: Job) -> None:
        job.drafts = []


class PlannedTwice(AheadScheduler):
    """What is in flight is planned again: progress is noted when a step is reported."""

    def _note_planned(self, job: Job, stop: int) -> None:
        pass

    def _advance(self, planned: Planned, tokens: Sequence[int]) -> None:
        planned.job.num_planned = planned.stop
        super()._advance(planned, tokens)


class EndForgotten(AheadScheduler):
    """The token in flight does not count towards the end of a request."""

    def _is_complete(self, job: Job) -> bool:
        return len(job.token_ids) >= job.num_total


class SpeculativeScheduler(AheadScheduler):
    """Verifies drafts, one step at a time."""

    max_steps_in_flight = 1
    max_draft_tokens = 3

    def propose(self, request_id: int, token_ids: Sequence[int]) -> None:
        job = next(job for job in (*self.active, *self.waiting) if job.request_id == request_id)
        if job in self.active:
            job.drafts = list(token_ids)


class RejectedCounted(SpeculativeScheduler):
    """Positions of rejected drafts count as computed."""

    def _take_back(self, job: Job, planned: Planned, num_rejected: int) -> None:
        pass


class RejectedPublished(SpeculativeScheduler):
    """Blocks are published with the drafts in them, before anybody knows which are accepted."""

    def _publish(self, planned: Planned, num_rejected: int) -> None:
        held, drafts = self.blocks.held[planned.job.request_id], planned.job.drafts[: planned.num_extra]
        first = planned.stop - planned.num_extra
        held.token_ids[first : planned.stop] = drafts
        self.blocks.computed(planned.job.request_id, planned.stop)
        held.num_computed = planned.stop - num_rejected


class DraftsBeyondTheModel(SpeculativeScheduler):
    """Drafts are not cut at the longest request."""

    def _longest(self) -> int:
        return 10**9


class DraftsOverBudget(SpeculativeScheduler):
    """Drafts do not count against the budget."""

    def _num_extra(self, job: Job, budget: int) -> int:
        return super()._num_extra(job, 10**9)


class DraftsWithoutSlots(SpeculativeScheduler):
    """Drafts are written where there is no block for them."""

    def _grow(self, job: Job, num_slots: int) -> bool:
        return super()._grow(job, min(num_slots, job.num_tokens))


class MultiTokenScheduler(AheadScheduler):
    """Each step samples up to three tokens for a request that has caught up."""

    max_steps_in_flight = 1
    max_tokens_per_step = 3


class CountedOnce(MultiTokenScheduler):
    """A step of several tokens counts as one."""

    def _note_planned(self, job: Job, stop: int) -> None:
        job.num_planned = min(stop, job.num_tokens)
